"""The blocks of a Transformer as functions of parameters and inputs. Flax modules declare the parameters and call these.

Parameters are nested dicts of arrays, in the layout of the Flax modules: {"q": {"kernel": ...}, "k": {"kernel": ...}, ...}. A
kernel is only ever handed on to `linear`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from coat_jax.ops.activation import add, gate_silu, gelu_function
from coat_jax.ops.attention import attention_linear
from coat_jax.ops.coded_weight import weight_codes
from coat_jax.ops.elementwise import Elementwise
from coat_jax.ops.linear import Prologue, linear
from coat_jax.ops.norm import NormKind, normalize_layer, normalize_rms
from coat_jax.ops.norm_kernels import NormFunction
from coat_jax.ops.recipe import Recipe
from coat_jax.ops.rope import Llama3Scaling, rope

Params = Mapping[str, Any]
Shapes = dict[str, tuple[int, int]]


class AttentionSizes(Protocol):
    """What self-attention has to know beside its parameters: a module or a configuration with these attributes."""

    @property
    def heads(self) -> int:
        """Heads of q."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        ...

    @property
    def head_dim(self) -> int | None:
        """Features of a head; None is those of the input over `heads`."""
        ...

    @property
    def rope_theta(self) -> float | None:
        """Base of the rotary frequencies; None is no rotation."""
        ...

    @property
    def rope_scaling(self) -> Llama3Scaling | None:
        """How the frequencies are scaled for longer contexts; None is not."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a token sees earlier tokens only."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias."""
        ...

    @property
    def o_bias(self) -> bool:
        """Whether the output has a bias."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and of k goes through an RMSNorm before the rotation."""
        ...

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms."""
        ...


class BlockSizes(AttentionSizes, Protocol):
    """What a Transformer block has to know: the attention's sizes, the width of the SwiGLU, and its norms."""

    @property
    def intermediate(self) -> int:
        """Width of the SwiGLU."""
        ...

    @property
    def norm(self) -> str:
        """A name of `NormKind`: "rms", or "layer" for LayerNorm without parameters."""
        ...


def plus_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y + bias over the last axes, in y's dtype; y where there is none."""
    return y if bias is None else y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def norm_prologue(params: Params, kind: str, eps: float, recipe: Recipe) -> Prologue:
    """The norm of (..., features) as what `linear` computes before its product; its input is kept as the recipe says.

    Args:
      params: {"scale": (features,)} of an RMSNorm; {} of a LayerNorm without parameters, as OLMo has it.
      kind: "rms" or "layer".
      eps: added to the mean square or the variance.
      recipe: what is kept of the input.

    Raises:
      ValueError: another kind.
      KeyError: an RMSNorm without a scale.
    """
    rms = NormKind.resolve(kind) is NormKind.RMS
    formula = functools.partial(normalize_rms if rms else normalize_layer, eps=eps)
    called = "rms_norm" if rms else "layer_norm"
    return Prologue(NormFunction(formula, called=called), recipe.nonlinear_input, (params["scale"],) if rms else ())


def attention_shapes(sizes: AttentionSizes, width: int) -> Shapes:
    """(in, out) of the kernels of `self_attention` for inputs of `width` features.

    Raises:
      ValueError: a width that the heads do not divide, where there is no `head_dim`.
    """
    head = sizes.head_dim
    if head is None:
        if width % sizes.heads:
            raise ValueError(f"self_attention: {width} features over heads={sizes.heads}; the second must divide the first")
        head = width // sizes.heads
    q, kv = sizes.heads * head, sizes.kv_heads * head
    return {"q": (width, q), "k": (width, kv), "v": (width, kv), "o": (q, width)}


def self_attention(
    params: Params, x: jax.Array, sizes: AttentionSizes, recipe: Recipe, norm: Prologue | None = None
) -> jax.Array:
    """o = attention(rope(h W_q), rope(h W_k), h W_v) W_o with grouped queries, h = norm(x); q, k and v share one FP8 input.

    q and k are kept after their rotation: what is kept is as large before as after, and so the backward pass need not rotate
    them again. Where each head has a norm, rope(norm(h W_q)) and rope(norm(h W_k)), they are kept before both.

    Args:
      params: {"q", "k", "v", "o"}, each {"kernel": (in, out)} and perhaps a "bias" (out,), see `attention_shapes`; with
        `sizes.qk_norm` "q_norm" and "k_norm" too, each {"scale": (head_dim,)}.
      x: (batch, tokens, features).
      sizes: heads, rotation and mask.
      recipe: what is quantized and kept.
      norm: what is applied to x first, inside the op that consumes it; None is nothing.

    Returns:
      (batch, tokens, out), in x's dtype.
    """
    names = ("q", "k", "v")
    ys = linear([x], [params[name]["kernel"] for name in names], recipe, prologue=norm)
    q, k, v = (plus_bias(y, params[name].get("bias")) for name, y in zip(names, ys, strict=True))
    head = q.shape[-1] // sizes.heads
    q, k, v = (y.reshape(*y.shape[:-1], y.shape[-1] // head, head) for y in (q, k, v))
    theta, scaling, before = sizes.rope_theta, sizes.rope_scaling, None
    if sizes.qk_norm:
        fn = functools.partial(normalize_heads, theta=theta, scaling=scaling, eps=sizes.norm_eps)
        before = Prologue(fn, recipe.nonlinear_input, (params["q_norm"]["scale"], params["k_norm"]["scale"]))
    elif theta is not None:
        q, k = (rope(y, theta=theta, scaling=scaling) for y in (q, k))
    [y] = attention_linear(q, k, v, [params["o"]["kernel"]], recipe, causal=sizes.causal, before=before)
    return plus_bias(y, params["o"].get("bias"))


def normalize_heads(
    q: jax.Array,
    k: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    *,
    theta: float | None,
    scaling: Llama3Scaling | None,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """rope(rms_norm(q)) and rope(rms_norm(k)), the norm over each head, plain; a theta of None is no rotation.

    Source: arXiv 2505.09388 (Qwen3).
    """
    heads = (normalize_rms(q, q_scale, eps=eps), normalize_rms(k, k_scale, eps=eps))
    q, k = heads if theta is None else (rope(y, theta=theta, scaling=scaling) for y in heads)
    return q, k


def multi_head_attention(
    params: Params,
    inputs: Mapping[str, jax.Array],
    recipe: Recipe,
    *,
    dtype: Any,
    norms: Mapping[str, Callable[[jax.Array], jax.Array]],
    causal: bool,
    mask: jax.Array | None,
) -> jax.Array:
    """o = attention(x W_q + b_q, y W_k + b_k, z W_v + b_v) W_o + b_o, of up to three inputs.

    Those of query, key and value that read the same array share one FP8 input.

    Args:
      params: {"query", "key", "value", "out"}, each with a "kernel" and perhaps a "bias": (in, heads, d) and (heads, d), those
        of "out" (heads, d, out) and (out,).
      inputs: {"query", "key", "value"}, each (batch, tokens, in).
      recipe: what is quantized and kept.
      dtype: of the computation.
      norms: functions of query and key behind their products, by name; {} is none.
      causal, mask: as in `ops.attention`.

    Returns:
      (batch, tokens, out), in `dtype`.
    """
    made: dict[str, jax.Array] = {}
    for x in {id(x): x for x in inputs.values()}.values():
        names = [name for name in inputs if inputs[name] is x]
        ys = linear([x.astype(dtype)], [params[name]["kernel"] for name in names], recipe)
        made |= {name: plus_bias(y, params[name].get("bias")) for name, y in zip(names, ys, strict=True)}
    made |= {name: norm(made[name]).astype(dtype) for name, norm in norms.items()}
    q, k, v = (made[name] for name in ("query", "key", "value"))
    [y] = attention_linear(q, k, v, [params["out"]["kernel"]], recipe, causal=causal, mask=mask)
    return plus_bias(y, params["out"].get("bias"))


def swiglu_shapes(intermediate: int, width: int, features: int | None = None) -> Shapes:
    """(in, out) of the kernels of `swiglu_mlp`; `features` of the result, None is the input's `width`."""
    out = width if features is None else features
    return {"gate": (width, intermediate), "up": (width, intermediate), "down": (intermediate, out)}


def swiglu_mlp(params: Params, x: jax.Array, recipe: Recipe, norm: Prologue | None = None) -> jax.Array:
    """y = (silu(h W_gate) * h W_up) W_down, h = norm(x); gate and up share one FP8 input, and FP8 of both is kept.

    Args:
      params: {"gate", "up", "down"}, each {"kernel": (in, out)}; see `swiglu_shapes`.
      x: (..., in).
      recipe: what is quantized and kept.
      norm: what is applied to x first, inside the op that consumes it; None is nothing.

    Returns:
      (..., out), in x's dtype.

    Source: arXiv 2002.05202.
    """
    gate_up = linear([x], [params[name]["kernel"] for name in ("gate", "up")], recipe, prologue=norm)
    activation = Prologue(Elementwise(gate_silu, called="swiglu"), recipe.nonlinear_input)
    [y] = linear(gate_up, [params["down"]["kernel"]], recipe, prologue=activation)
    return y


def gelu_mlp(
    params: Params, x: jax.Array, recipe: Recipe, norm: Prologue | None = None, *, approximate: bool = True
) -> jax.Array:
    """y = gelu(h W_in + b_in) W_out + b_out, h = norm(x); FP8 of the input and of what gelu reads is kept.

    Args:
      params: {"in", "out"}, each with a "kernel" (in, out) and perhaps a "bias" (out,).
      x: (..., in).
      recipe: what is quantized and kept.
      norm: what is applied to x first, inside the op that consumes it; None is nothing.
      approximate: whether gelu is the tanh approximation.

    Returns:
      (..., out), in x's dtype.
    """
    [h] = linear([x], [params["in"]["kernel"]], recipe, prologue=norm)
    gelu = Prologue(gelu_function(approximate), recipe.nonlinear_input)
    [y] = linear([plus_bias(h, params["in"].get("bias"))], [params["out"]["kernel"]], recipe, prologue=gelu)
    return plus_bias(y, params["out"].get("bias"))


def block_codes(params: Params, recipe: Recipe) -> dict[str, Any]:
    """The codes of the kernels of a `transformer_block`, in the places of these; None for what is no kernel.

    A caller that runs the block several times on the same parameters makes them once, and gives the block an `ops.CodedWeight`
    in place of each kernel. Under a recipe that quantizes no weight all are None.
    """

    def kernels(layers: Params) -> dict[str, Any]:
        return {
            name: {leaf: weight_codes(x, recipe) if leaf == "kernel" else None for leaf, x in layer.items()}
            for name, layer in layers.items()
        }

    made = {name: kernels(params[name]) for name in ("attention", "mlp")}
    return {name: made.get(name) for name in params}


def transformer_block(params: Params, x: jax.Array, sizes: BlockSizes, recipe: Recipe) -> jax.Array:
    """x <- x + attention(norm(x)); x <- x + swiglu(norm(x)).

    Args:
      params: {"attention_norm", "attention", "mlp_norm", "mlp"}: of `norm_prologue` (may be absent where the norm has no
        parameters), `self_attention` and `swiglu_mlp`.
      x: (batch, tokens, features).
      sizes: heads, rotation, mask and norms.
      recipe: what is quantized and kept.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: a norm that is neither "rms" nor "layer".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax import FP8TransformerBlock, ops, recipes
      >>> block, x = FP8TransformerBlock(heads=2, kv_heads=1, intermediate=64), jnp.ones((1, 4, 32))
      >>> params = block.init(jax.random.key(0), x)["params"]
      >>> y = ops.blocks.transformer_block(params, x, block, recipes.coat())
      >>> bool((y == block.apply({"params": params}, x)).all())
      True
    """

    def norm(name: str) -> Prologue:
        return norm_prologue(params.get(name, {}), sizes.norm, sizes.norm_eps, recipe)

    with jax.named_scope("attention"):
        x = add(x, self_attention(params["attention"], x, sizes, recipe, norm("attention_norm")))
    with jax.named_scope("mlp"):
        return add(x, swiglu_mlp(params["mlp"], x, recipe, norm("mlp_norm")))

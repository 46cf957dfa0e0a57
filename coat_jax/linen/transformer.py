"""A decoder layer: attention and SwiGLU, each after a norm and added to the residual stream. Skins over `ops.blocks`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import recipes
from coat_jax.linen.parameters import WithRecipe, declare_kernels
from coat_jax.ops import Llama3Scaling, NormKind, Prologue, Recipe, blocks


class NormScale(nn.Module):
    """The parameters of a norm without the norm: for blocks that apply it inside the products that read it.

    Parameters: a `scale` where the norm is "rms", none where it is "layer" (LayerNorm without parameters, as OLMo has it).

    Attributes:
      kind: "rms" or "layer".
      param_dtype: dtype of the scale.

    Raises:
      ValueError: another kind.
    """

    kind: str = "rms"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, features: int) -> dict[str, jax.Array]:
        """{"scale": (features,)}, or {}."""
        if NormKind.resolve(self.kind) is NormKind.LAYER:
            return {}
        return {"scale": self.param("scale", nn.initializers.ones, (features,), self.param_dtype)}


def declare_attention(sizes: blocks.AttentionSizes, width: int, *, param_dtype: Any, kernel_init: Any) -> dict[str, Any]:
    """The parameters of `ops.blocks.self_attention` for inputs of `width` features, in the module that is being run."""
    shapes = blocks.attention_shapes(sizes, width)
    biased = (*("q", "k", "v") * sizes.qkv_bias, *("o",) * sizes.o_bias)
    params = declare_kernels(shapes, biased, param_dtype=param_dtype, kernel_init=kernel_init)
    if sizes.qk_norm:
        head = shapes["q"][1] // sizes.heads
        params |= {name: NormScale("rms", param_dtype, name=name)(head) for name in ("q_norm", "k_norm")}
    return params


class Declared(nn.Module):
    """The parameters that a function declares, under one name.

    Attributes:
      declare: gives the parameters, in the module that is being run.
    """

    declare: Callable[[], dict[str, Any]]

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        """What `declare` gives."""
        return self.declare()


def declare_block(sizes: blocks.BlockSizes, width: int, *, param_dtype: Any, kernel_init: Any) -> dict[str, Any]:
    """The parameters of `ops.blocks.transformer_block` for inputs of `width` features, in the module that is being run."""
    options = {"param_dtype": param_dtype, "kernel_init": kernel_init}
    mlp = blocks.swiglu_shapes(sizes.intermediate, width)
    return {
        "attention_norm": NormScale(sizes.norm, param_dtype, name="attention_norm")(width),
        "attention": Declared(lambda: declare_attention(sizes, width, **options), name="attention")(),
        "mlp_norm": NormScale(sizes.norm, param_dtype, name="mlp_norm")(width),
        "mlp": Declared(lambda: declare_kernels(mlp, **options), name="mlp")(),
    }


class FP8SelfAttention(WithRecipe, nn.Module):
    """o = attention(rope(x W_q), rope(x W_k), x W_v) W_o with grouped queries; q, k and v share one FP8 input.

    Parameters: `q`, `k`, `v`, `o`, each with a `kernel` of two axes and perhaps a `bias`; with `qk_norm` also `q_norm` and
    `k_norm`, each with a `scale`.

    Attributes:
      heads, kv_heads: heads of q, and of k and v.
      rope_theta: base of the rotary frequencies; None is no rotation.
      causal: whether a token sees earlier tokens only.
      param_dtype, kernel_init: of the parameters.
      recipe: what is quantized and kept.
      head_dim: features of a head; None is those of the input over `heads`.
      rope_scaling: how the rotary frequencies are scaled for longer contexts; None is not.
      qkv_bias, o_bias: whether q, k and v have a bias, and whether the output has one.
      qk_norm: whether each head of q and of k goes through an RMSNorm before the rotation, as in Qwen3.
      norm_eps: epsilon of these norms.
    """

    heads: int
    kv_heads: int
    rope_theta: float | None = 10_000.0
    causal: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    recipe: Recipe = recipes.coat()
    head_dim: int | None = None
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(batch, tokens, features) to the same shape; `norm` is applied to x first, inside the op that consumes it."""
        params = declare_attention(self, x.shape[-1], param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        return blocks.self_attention(params, x, self, self.recipe, norm)


class FP8TransformerBlock(WithRecipe, nn.Module):
    """x <- x + attention(norm(x)); x <- x + swiglu(norm(x)).

    Parameters: `attention_norm`, `attention` (q, k, v, o), `mlp_norm`, `mlp` (gate, up, down).

    Attributes:
      heads, kv_heads, rope_theta, causal: of the attention; see `FP8SelfAttention`.
      intermediate: width of the SwiGLU.
      norm: "rms", or "layer" for LayerNorm without parameters.
      norm_eps: epsilon of all norms.
      param_dtype, kernel_init: of the parameters. The computation runs in x's dtype.
      recipe: what is quantized and kept.
      head_dim, rope_scaling, qkv_bias, o_bias, qk_norm: of the attention.
    """

    heads: int
    kv_heads: int
    intermediate: int
    rope_theta: float | None = 10_000.0
    causal: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-5
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    recipe: Recipe = recipes.coat()
    head_dim: int | None = None
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, tokens, features) to the same shape."""
        params = declare_block(self, x.shape[-1], param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        return blocks.transformer_block(params, x, self, self.recipe)

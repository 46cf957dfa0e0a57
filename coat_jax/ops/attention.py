"""Attention: cuDNN where the program runs on an NVIDIA GPU, XLA elsewhere. Attention matrices are never kept."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coat_jax.ops.linear import LinearWeight, Prologue, linear, refuse_single
from coat_jax.ops.recipe import Recipe
from coat_jax.ops.stash import STASH, stashed

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def softmax_average(q, k, v, mask=None, *, causal: bool, implementation: Any) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v, plain."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=implementation)


def has_cudnn(fn: Attend, *args: Any) -> bool:
    """Whether cuDNN is installed and takes arrays of these shapes and dtypes, its backward pass included."""
    try:
        jax.eval_shape(lambda *args: jax.vjp(fn, *args)[0], *args)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def split_vjp(fn: Attend, args: tuple[jax.Array, ...]) -> tuple[jax.Array, list[jax.Array], Callable[..., Any]]:
    """fn(*args), what its backward pass needs beyond args and the result, and a function of all these giving the vjp."""
    # jax.vjp's pullback is a tree whose leaves are the residuals, and a residual that is an argument or the result is that very
    # array. Of cuDNN's attention the leaves are (q, k, v, log_sums, o): known = (q, k, v, o) gives source = [0, 1, 2, None, 3],
    # so log_sums alone crosses as `extra`, and rebuild puts the four others back from their numbers. An equal array that is
    # not the same object would count as extra: kept twice, never wrong.
    out, pull = jax.vjp(fn, *args)
    leaves, tree = jax.tree.flatten(pull)
    known = (*args, out)
    source = [next((i for i, x in enumerate(known) if x is leaf), None) for leaf in leaves]

    def rebuild(args, out, extra):
        known, rest = (*args, out), iter(extra)
        return jax.tree.unflatten(tree, [next(rest) if i is None else known[i] for i in source])

    return out, [leaf for leaf, i in zip(leaves, source, strict=True) if i is None], rebuild


def by_platform(cudnn: Attend, xla: Attend) -> Attend:
    """`cudnn` on NVIDIA GPUs and `xla` elsewhere, chosen when the program is lowered, as one differentiable function.

    What cuDNN keeps for its backward pass (the result and the log-sums) crosses as residuals; XLA keeps q, k and v and runs
    again. Differentiating `platform_dependent` itself would carry the residuals of both, attention matrices included.
    """

    def choose(*args):
        return jax.lax.platform_dependent(*args, cuda=cudnn, default=xla)

    def forward(*args):
        args = checkpoint_name(args, STASH)
        pulls = []

        def on_gpu(*args):
            out, extra, rebuild = split_vjp(cudnn, args)
            pulls.append(rebuild)
            return out, extra

        def elsewhere(*args):
            return xla(*args), [jnp.zeros(x.shape, x.dtype) for x in extra_shapes]

        _, extra_shapes = jax.eval_shape(on_gpu, *args)
        out, extra = checkpoint_name(jax.lax.platform_dependent(*args, cuda=on_gpu, default=elsewhere), STASH)
        return out, (args, out, extra, jax.tree_util.Partial(pulls[-1]))

    def backward(residual, g):
        args, out, extra, rebuild = residual

        def on_gpu(g, args, out, extra):
            return rebuild(args, out, extra)(g)[:3]

        def elsewhere(g, args, out, extra):
            return jax.vjp(xla, *args)[1](g)[:3]

        grads = jax.lax.platform_dependent(g, args, out, extra, cuda=on_gpu, default=elsewhere)
        return (*grads, *[None] * (len(args) - 3))

    op = jax.custom_vjp(choose)
    op.defvjp(forward, backward)
    return op


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    mask: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """o = softmax(q k^T / sqrt(d)) v for every head, with a causal mask, a given one, both or none.

    Its own residuals are q, k, v, o and a float32 log-sum per row on an NVIDIA GPU; q, k and v elsewhere. To keep FP8 of
    q, k and v instead and run forward again, use `attention_linear`.

    Args:
      q: (batch, tokens, heads, d).
      k, v: (batch, keys, kv_heads, d); heads a multiple of kv_heads (grouped-query attention).
      causal: whether token t sees keys up to t only.
      mask: bool, broadcastable to (batch, heads, tokens, keys); True lets a token see a key.
      implementation: "cudnn", "xla", or None: cuDNN on NVIDIA GPUs where it is installed and takes the shapes and dtypes
        (16-bit, d a multiple of 8, even numbers of tokens), XLA elsewhere.

    Returns:
      An array of q's shape and dtype.

    Raises:
      ValueError: an unknown implementation, or heads that kv_heads does not divide.
      TypeError: a mask that is not bool.
      RuntimeError, NotImplementedError: cuDNN, asked for by name, is missing or does not take the shapes.

    Source: arXiv 1706.03762; grouped queries arXiv 2305.13245.
    """
    if implementation not in (None, "cudnn", "xla"):
        raise ValueError(f"attention: implementation={implementation!r} is unknown; use None, 'cudnn' or 'xla'")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"attention: {q.shape[-2]} heads in q and {k.shape[-2]} in k; the second must divide the first")
    if mask is not None and mask.dtype != bool:
        raise TypeError(
            f"attention: mask has dtype {mask.dtype}; use bool, as mask.astype(bool) makes it of Flax's float masks"
        )
    cudnn, xla = (functools.partial(softmax_average, causal=causal, implementation=name) for name in ("cudnn", "xla"))
    args = (q, k, v) if mask is None else (q, k, v, mask)
    if implementation == "cudnn":
        return cudnn(*args)
    if implementation == "xla" or not has_cudnn(cudnn, *args):
        return stashed(xla, [None] * len(args))(*args)
    return by_platform(cudnn, xla)(*args)


def attention_linear(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kernels: Sequence[LinearWeight],
    recipe: Recipe,
    *,
    causal: bool = True,
    mask: jax.Array | None = None,
    before: Prologue | None = None,
) -> list[jax.Array]:
    """y_j = attention(*before(q, k), v) · kernels_j, contracting heads and d.

    With `recipe.attention` q, k and v are kept in FP8 and the attention forward is rerun in the backward pass; without, the
    attention keeps what its own backward pass reads, and the product shares the attention output with it.

    Args:
      q, k, v, causal, mask: as in `attention`.
      kernels: each (heads, d, *features) or (heads * d, *features); a `CodedWeight` brings its codes.
      recipe: what is kept and multiplied.
      before: what q and k go through first, norms of the heads: fn(q, k, *params) -> (q, k). With `recipe.attention` it is run
        again with the attention, and nothing else is kept for it; without, q and k before it are kept as its spec. None is
        nothing.

    Returns:
      For each kernel (batch, tokens, *features), in q's dtype.

    Raises:
      TypeError: an array in place of the list of kernels.
      ValueError: as `attention` and `linear` do.
    """
    refuse_single("attention_linear", kernels=kernels)
    if recipe.attention is None:
        if before is not None:
            fn, spec, params = before
            q, k = (fn if spec is None else stashed(fn, [spec] * 2, implementation=recipe.implementation))(q, k, *params)
        return linear([attention(q, k, v, causal=causal, mask=mask)], kernels, recipe, axes=2, shared=True)
    params, masks = () if before is None else before.params, () if mask is None else (mask,)

    def attend(q, k, v, *others):
        if before is not None:
            q, k = before.fn(q, k, *others[: len(params)])
        return attention(q, k, v, causal=causal, mask=others[-1] if masks else None)

    prologue = Prologue(attend, recipe.attention, (*params, *masks))
    return linear([q, k, v], kernels, recipe, prologue=prologue, axes=2)

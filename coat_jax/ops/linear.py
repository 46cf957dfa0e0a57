"""Weight products in FP8: several kernels that share one quantized input and one stash."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coat_jax.ops.recipe import Recipe
from coat_jax.ops.stash import STASH, Kept, keep_quantized, restore_quantized, stashed
from coat_jax.quant import PerTensor, QuantizedArray, QuantSpec, dequantize, quantize

Operand = QuantizedArray | jax.Array


def operand(x: jax.Array, spec: QuantSpec | None) -> Operand:
    """A matrix as an operand of a product: quantized, or as it is for None."""
    return x if spec is None else quantize(x, spec)


def values(x: Operand, dtype: Any) -> jax.Array:
    """An operand in the dtype of the computation.

    One scale times the payload is written in `dtype`, the form in which XLA recognises an FP8 product on Hopper.
    """
    if not isinstance(x, QuantizedArray):
        return x.astype(dtype)
    if isinstance(x.spec.granularity, PerTensor) and x.spec.expansion is None:
        return x.payload.astype(dtype) * x.scale.astype(dtype)
    return dequantize(x, dtype)


def matrix_product(a: Operand, b: Operand, contract: tuple[int, int], recipe: Recipe, dtype: Any, out: Any) -> jax.Array:
    """Contracts axis contract[0] of matrix a with contract[1] of matrix b, in `dtype`, giving dtype `out`."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    a, b = values(a, dtype), values(b, dtype)
    return jax.lax.dot_general(a, b, dims, precision=recipe.precision, preferred_element_type=out)


def keep_operand(x: Operand, shared: jax.Array | None) -> Kept:
    """What the backward pass gets of a product's input: its FP8, or the array itself where others keep that anyway."""
    if shared is not None:
        return shared
    return keep_quantized(x) if isinstance(x, QuantizedArray) else checkpoint_name(x, STASH)


def products(h: jax.Array, kernels: Sequence[jax.Array], recipe: Recipe, *, shared: bool = False) -> list[jax.Array]:
    """Y_j = q(H) q(W_j), dH = sum_j q(dY_j) q(W_j)^T, dW_j = q(H)^T q(dY_j), with q the recipe's quantization of each role.

    q(H) is kept for the backward pass; the kernels are quantized again there.

    Args:
      h: matrix (rows, contracted).
      kernels: matrices (contracted, features), of any float dtype; their gradients have the same.
      recipe: specs of the three roles.
      shared: h itself is kept anyway, by the op that made it: keep it by reference instead of q(H).

    Returns:
      For each kernel a matrix (rows, features) in h's dtype.
    """
    dtype = h.dtype
    into = functools.partial(matrix_product, recipe=recipe, dtype=dtype)

    def run(h, kernels):
        return forward(h, kernels)[0]

    def forward(h, kernels):
        x = operand(h, recipe.linear_input)
        ys = [into(x, operand(w, recipe.weight), (1, 0), out=dtype) for w in kernels]
        return ys, (keep_operand(x, h if shared else None), kernels)

    def backward(residual, gs):
        kept, kernels = residual
        x = restore_quantized(kept) if isinstance(kept, QuantizedArray) else operand(kept, recipe.linear_input)
        gs = [operand(g, recipe.gradient) for g in gs]
        dws = [into(x, g, (0, 0), out=w.dtype) for g, w in zip(gs, kernels, strict=True)]
        dhs = [into(g, operand(w, recipe.weight), (1, 1), out=dtype) for g, w in zip(gs, kernels, strict=True)]
        return functools.reduce(jnp.add, dhs), dws

    op = jax.custom_vjp(run)
    op.defvjp(forward, backward)
    return op(h, list(kernels))


def contract(h: jax.Array, kernels: Sequence[jax.Array], recipe: Recipe, *, axes: int, shared: bool) -> list[jax.Array]:
    """`products` of arrays: the last `axes` axes of h with the first `axes` of each kernel."""
    lead, contracted = h.shape[: h.ndim - axes], h.shape[h.ndim - axes :]
    for i, kernel in enumerate(kernels):
        if kernel.shape[:axes] != contracted:
            raise ValueError(
                f"linear: kernel {i} has shape {kernel.shape}; over {axes} axes of {h.shape} it must begin with {contracted}"
            )
    if not recipe.products_quantized:
        dims = ((tuple(range(h.ndim - axes, h.ndim)), tuple(range(axes))), ((), ()))
        return [jax.lax.dot_general(h, w.astype(h.dtype), dims, precision=recipe.precision) for w in kernels]
    size = math.prod(contracted)
    ys = products(h.reshape(-1, size), [w.reshape(size, -1) for w in kernels], recipe, shared=shared)
    return [y.reshape(*lead, *w.shape[axes:]) for y, w in zip(ys, kernels, strict=True)]


class Prologue(NamedTuple):
    """The norm, activation or attention before a product, computed inside the op that consumes it.

    Attributes:
      fn: h = fn(*inputs, *params), without captured traced values.
      spec: what is kept of each input for the backward pass; None keeps the input itself.
      params: parameters of fn, kept by reference.
    """

    fn: Callable[..., jax.Array]
    spec: QuantSpec | None
    params: tuple[Any, ...] = ()


def linear(
    inputs: Sequence[jax.Array],
    kernels: Sequence[jax.Array],
    recipe: Recipe,
    *,
    prologue: Prologue | None = None,
    axes: int = 1,
    shared: bool = False,
) -> list[jax.Array]:
    """y_j = h · kernels_j with h = prologue(*inputs): what feeds several kernels is quantized once and kept once.

    For the backward pass the prologue's inputs are kept as its spec says, and FP8 of h; with `recipe.redo` only the former,
    and the prologue is redone. Kernels are kept by reference. A product of two operands with one scale each is an FP8
    product on Hopper.

    Args:
      inputs: what the prologue reads; without a prologue one array, h itself.
      kernels: each (*contracted, *features), of any float dtype; quantized from it directly. h ends in the contracted axes.
      recipe: what the operands are quantized to. Where it names no role of a product, this is plain `dot_general`.
      prologue: what is computed before the product.
      axes: number of contracted axes.
      shared: h is kept anyway by the op that made it; keep it by reference.

    Returns:
      For each kernel (*leading, *features), in h's dtype.

    Raises:
      ValueError: shapes that do not contract.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> [y] = ops.linear([jnp.ones((2, 8))], [jnp.full((8, 3), 0.5)], recipes.coat())
      >>> y.shape, y[0, 0].item()
      ((2, 3), 4.0)

    Source: arXiv 2410.19313, section 5.
    """
    kernels = list(kernels)
    multiply = functools.partial(contract, recipe=recipe, axes=axes, shared=shared)
    if prologue is None:
        (h,) = inputs
        return multiply(h, kernels)
    fn, spec, params = prologue
    if spec is None and not recipe.products_quantized:
        return multiply(fn(*inputs, *params), kernels)
    specs = [spec] * len(inputs)
    if recipe.redo:
        return stashed(lambda *args: multiply(fn(*args[:-1]), args[-1]), specs)(*inputs, *params, kernels)
    return multiply(stashed(fn, specs)(*inputs, *params), kernels)

"""Products of any axes in FP8: `jax.lax.dot_general` and `jax.numpy.einsum` of an input and a kernel, by a recipe."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from coat_jax.ops.linear import linear
from coat_jax.ops.recipe import Recipe
from coat_jax.quant.explicit import explicit_mesh, joined, on_auto_axes, spec_of

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    recipe: Recipe,
    *,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Y = q(lhs) q(rhs), dlhs = q(dY) q(rhs)^T, drhs = q(lhs)^T q(dY), with axes as in `jax.lax.dot_general`.

    q is the recipe's quantization of the input, the weight and the gradient. FP8 of `lhs`, the input, is kept for the backward
    pass; `rhs` is the kernel, kept by reference. Along batch dimensions each pair of matrices has scales of its own.

    Args:
      lhs: (*batch, *rows, *contracted) in any order, in the dtype of the computation.
      rhs: (*batch, *contracted, *features) in any order, of any float dtype; quantized from it directly.
      dimension_numbers: ((lhs contracted, rhs contracted), (lhs batch, rhs batch)).
      recipe: what operands and gradients are quantized to; where it quantizes no product, this is `jax.lax.dot_general`.
      preferred_element_type: dtype of the product; None takes lhs's.
      out_sharding: where the product lies on Explicit axes; None is as its operands' rows and features do.

    Returns:
      (*batch, *rows, *features).

    Raises:
      TypeError: operands that are no bfloat16, float16, float32 or float64, or that do not contract.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> ops.dot_general(jnp.ones((2, 8)), jnp.ones((3, 8)), (((1,), (1,)), ((), ())), recipes.coat()).shape
      (2, 3)

    Source: arXiv 2410.19313, section 5.
    """
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise TypeError(f"dot_general: {name} is {x.dtype}; use bfloat16 or float32, or jax.lax.dot_general itself")
    exact = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=recipe.precision,
        preferred_element_type=preferred_element_type or lhs.dtype,
        out_sharding=out_sharding,
    )
    if not recipe.products_quantized:
        return exact(lhs, rhs.astype(lhs.dtype))
    jax.eval_shape(exact, lhs, rhs)  # refuses, in JAX's words, what does not contract
    multiply = functools.partial(
        _multiply, dimension_numbers=dimension_numbers, recipe=recipe, preferred_element_type=preferred_element_type
    )
    mesh = explicit_mesh(lhs, rhs)
    if mesh is None:
        y = multiply(lhs, rhs)
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
    place = _place(lhs, rhs, dimension_numbers) if out_sharding is None else out_sharding
    return on_auto_axes(multiply, mesh, place.spec if isinstance(place, NamedSharding) else place)(lhs, rhs)


def _multiply(
    lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Dimensions, recipe: Recipe, preferred_element_type: Any
) -> jax.Array:
    """The product by `ops.linear`, with the contracted axes made one: (b, t, n, h), (n, h, d) become (b, t, nh), (nh, d)."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    rows = [i for i in range(lhs.ndim) if i not in (*left, *left_batch)]
    features = [i for i in range(rhs.ndim) if i not in (*right, *right_batch)]
    size = math.prod(lhs.shape[i] for i in left)
    batch, out = [lhs.shape[i] for i in left_batch], [rhs.shape[i] for i in features]
    h = lhs.transpose(*left_batch, *rows, *left).reshape(*batch, *(lhs.shape[i] for i in rows), size)
    kernel = rhs.transpose(*right_batch, *right, *features).reshape(*batch, size, *out)

    def multiply(h: jax.Array, kernel: jax.Array) -> jax.Array:
        return linear([h], [kernel], recipe, preferred_element_type=preferred_element_type)[0]

    for _ in batch:
        multiply = jax.vmap(multiply)
    return multiply(h, kernel)


def _place(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Dimensions) -> PartitionSpec:
    """Where a product lies on Explicit axes: batch and rows as the left operand's, features as the right one's."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    of_left, of_right = spec_of(lhs), spec_of(rhs)
    return joined(
        [of_left[i] for i in (*left_batch, *(i for i in range(lhs.ndim) if i not in (*left, *left_batch)))],
        [of_right[i] for i in range(rhs.ndim) if i not in (*right, *right_batch)],
    )


def einsum(
    subscripts: str,
    lhs: jax.Array,
    rhs: jax.Array,
    recipe: Recipe,
    *,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`dot_general` of an input and a kernel with axes as in `jax.numpy.einsum`.

    Raises:
      ValueError: subscripts of one operand or of three, or with a letter twice in one operand.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> ops.einsum("btd,dnh->bnth", jnp.ones((2, 3, 8)), jnp.ones((8, 4, 5)), recipes.coat()).shape
      (2, 4, 3, 5)
    """
    left, right, result = _axes(subscripts, lhs.ndim, rhs.ndim)
    # An axis of one operand that the result does not have is summed before: "ij,kl->il" sums j of the left, k of the right.
    lhs, left = _summed(lhs, left, right + result)
    rhs, right = _summed(rhs, right, left + result)
    batch = [a for a in left if a in right and a in result]
    inner = [a for a in left if a in right and a not in result]
    of = lambda names: ([left.index(a) for a in names], [right.index(a) for a in names])  # noqa: E731
    order = [*batch, *(a for a in left if a not in batch + inner), *(a for a in right if a not in batch + inner)]
    turned = [order.index(a) for a in result]
    in_place = turned == sorted(turned)
    options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding if in_place else None}
    y = jnp.transpose(dot_general(lhs, rhs, (of(inner), of(batch)), recipe, **options), turned)
    return y if in_place or out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _axes(subscripts: str, left: int, right: int) -> tuple[list[str], list[str], list[str]]:
    """A name for each axis of both operands and of the result; axes under an ellipsis are called 0, 1, ... from the right.

    "...d,df->...f" of 3 and 2 axes: [1, 0, d], [d, f], [1, 0, f].
    """
    operands, arrow, result = subscripts.replace(" ", "").partition("->")
    if operands.count(",") != 1:
        raise ValueError(
            f"einsum: subscripts={subscripts!r} names {operands.count(',') + 1} operands; use an input and a kernel"
        )
    a, b = (_named(term, rank, subscripts) for term, rank in zip(operands.split(","), (left, right), strict=True))
    hidden = max(sum(name.isdigit() for name in names) for names in (a, b))
    if arrow:
        return a, b, _named(result, len(result.replace("...", "")) + hidden * ("..." in result), subscripts)
    letters = sorted(name for name in {*a} ^ {*b} if not name.isdigit())
    return a, b, [str(i) for i in reversed(range(hidden))] + letters


def _named(term: str, rank: int, subscripts: str) -> list[str]:
    before, dots, after = term.partition("...")
    hidden = rank - len(before + after)
    names = [*before, *(str(i) for i in reversed(range(hidden))), *after]
    if hidden < 0 or (hidden > 0 and not dots):
        raise ValueError(
            f"einsum: subscripts={subscripts!r} names {len(before + after)} axes as {term!r} of an array that has {rank}"
        )
    if len({*names}) < len(names):
        raise ValueError(f"einsum: subscripts={subscripts!r} has a letter twice in {term!r}; use jax.numpy.diagonal before")
    return names


def _summed(x: jax.Array, names: list[str], used: list[str]) -> tuple[jax.Array, list[str]]:
    alone = tuple(i for i, a in enumerate(names) if a not in used)
    return (jnp.sum(x, alone) if alone else x), [a for a in names if a in used]

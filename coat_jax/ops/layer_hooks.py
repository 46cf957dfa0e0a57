"""FP8 products for layers that are not this library's: what goes where a layer takes a `dot_general` or an einsum."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from coat_jax import ops
from coat_jax.ops import Recipe
from coat_jax.quant.explicit import explicit_mesh, joined, on_auto_axes, spec_of

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` whose operands are quantized as a recipe says; equal where recipes are. Made by `dot_general`."""

    recipe: Recipe

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Dimensions,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """(*batch, *lhs, contracted) times (*batch, contracted, *rhs) in any order of axes gives (*batch, *lhs, *rhs)."""
        exact = functools.partial(
            jax.lax.dot_general,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        if not self.recipe.products_quantized:
            return exact(lhs, rhs)
        for name, x in (("lhs", lhs), ("rhs", rhs)):
            if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
                raise TypeError(f"dot_general: {name} is {x.dtype}; use bfloat16 or float32, or jax.lax.dot_general itself")
        dtype = jax.eval_shape(exact, lhs, rhs).dtype  # also refuses, in JAX's words, what does not contract
        recipe = self.recipe if precision is None else self.recipe.replace(precision=precision)
        multiply = functools.partial(_multiply, dimension_numbers=dimension_numbers, recipe=recipe, dtype=dtype)
        mesh = explicit_mesh(lhs, rhs)
        if mesh is None:
            y = multiply(lhs, rhs)
            return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
        place = _place(lhs, rhs, dimension_numbers) if out_sharding is None else out_sharding
        return on_auto_axes(multiply, mesh, place.spec if isinstance(place, NamedSharding) else place)(lhs, rhs)


def dot_general(recipe: Recipe) -> DotGeneral:
    """`jax.lax.dot_general` in FP8, for any layer that takes one: nn.Dense, nnx.Linear, nnx.LinearGeneral, one's own.

    Y = q(lhs) q(rhs), dlhs = q(dY) q(rhs)^T, drhs = q(lhs)^T q(dY), with q the recipe's quantization of the input, the weight
    and the gradient. `lhs` is the input, of which FP8 is kept for the backward pass; `rhs` is the kernel, kept by reference.
    Along batch dimensions each pair of matrices has scales of its own. Two hooks of one recipe are equal.

    A layer hands over its kernel in the dtype of the computation, so it is quantized from that; `FP8Dense` and
    `coat_jax.nnx.FP8Linear` quantize the parameter itself.

    Args:
      recipe: what operands and gradients are quantized to; `recipes.bf16()` is `jax.lax.dot_general` itself.

    Returns:
      A function of (lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None). On Explicit
      axes the result lies as its operands' rows and features do where `out_sharding` does not say.

    Raises:
      TypeError: not a recipe; later, operands that are no bfloat16, float16, float32 or float64, or that do not contract.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import coat_jax
      >>> layer = nn.Dense(4, dot_general=coat_jax.dot_general(coat_jax.recipes.coat()))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3)))[0].shape
      (1, 4)

    Source: arXiv 2410.19313, section 5.
    """
    return DotGeneral(_checked("dot_general", recipe))


@dataclasses.dataclass(frozen=True)
class Einsum:
    """`jax.numpy.einsum` of two operands, quantized as a recipe says; equal where recipes are. Made by `einsum`."""

    recipe: Recipe

    def __call__(
        self,
        subscripts: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """As `jax.numpy.einsum(subscripts, lhs, rhs)`."""
        left, right, result = _axes(subscripts, lhs.ndim, rhs.ndim)
        if not self.recipe.products_quantized:
            given = {} if out_sharding is None else {"out_sharding": out_sharding}
            chosen = {"precision": precision, "preferred_element_type": preferred_element_type, **given}
            return jnp.einsum(subscripts, lhs, rhs, **chosen)
        # An axis of one operand that the result does not have is summed before: "ij,kl->il" sums j of the left, k of the right.
        lhs, left = _summed(lhs, left, right + result)
        rhs, right = _summed(rhs, right, left + result)
        batch = [a for a in left if a in right and a in result]
        inner = [a for a in left if a in right and a not in result]
        of = lambda names: ([left.index(a) for a in names], [right.index(a) for a in names])  # noqa: E731
        dimension_numbers = of(inner), of(batch)
        order = [*batch, *(a for a in left if a not in batch + inner), *(a for a in right if a not in batch + inner)]
        turned = [order.index(a) for a in result]
        product = DotGeneral(self.recipe)
        in_place = turned == sorted(turned)
        y = product(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding if in_place else None)
        y = jnp.transpose(y, turned)
        return y if in_place or out_sharding is None else jax.sharding.reshard(y, out_sharding)


def einsum(recipe: Recipe) -> Einsum:
    """`jax.numpy.einsum` of an input and a kernel in FP8, for any layer that takes one, as `nnx.Einsum(einsum_op=...)` does.

    The product is that of `coat_jax.dot_general`: the first operand is the input, of which FP8 is kept, the second the kernel.

    Args:
      recipe: what operands and gradients are quantized to; `recipes.bf16()` is `jax.numpy.einsum` itself.

    Returns:
      A function of (subscripts, lhs, rhs, *, precision=None, preferred_element_type=None, out_sharding=None).

    Raises:
      TypeError: not a recipe.
      ValueError: later, subscripts of one operand or of three, or with a letter twice in one operand.

    Example:
      >>> import jax.numpy as jnp
      >>> import coat_jax
      >>> product = coat_jax.einsum(coat_jax.recipes.coat())
      >>> product("btd,dnh->bnth", jnp.ones((2, 3, 8)), jnp.ones((8, 4, 5))).shape
      (2, 4, 3, 5)
    """
    return Einsum(_checked("einsum", recipe))


def _checked(called: str, recipe: Recipe) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{called}: recipe={recipe!r}; use a Recipe, such as coat_jax.recipes.coat()")
    return recipe


def _multiply(lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Dimensions, recipe: Recipe, dtype: Any) -> jax.Array:
    """The product by `ops.linear`, with the contracted axes made one: (b, t, n, h), (n, h, d) become (b, t, nh), (nh, d)."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    rows = [i for i in range(lhs.ndim) if i not in (*left, *left_batch)]
    features = [i for i in range(rhs.ndim) if i not in (*right, *right_batch)]
    size = math.prod(lhs.shape[i] for i in left)
    batch, out = [lhs.shape[i] for i in left_batch], [rhs.shape[i] for i in features]
    h = lhs.transpose(*left_batch, *rows, *left).reshape(*batch, *(lhs.shape[i] for i in rows), size)
    kernel = rhs.transpose(*right_batch, *right, *features).reshape(*batch, size, *out)
    h = h.astype(jnp.result_type(h, kernel))

    def multiply(h: jax.Array, kernel: jax.Array) -> jax.Array:
        return ops.linear([h], [kernel], recipe, preferred_element_type=dtype)[0]

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

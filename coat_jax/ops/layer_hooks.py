"""FP8 products for layers that are not this library's: what goes where a layer takes a `dot_general` or an einsum."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.ops import contraction
from coat_jax.ops.contraction import Dimensions
from coat_jax.ops.recipe import Recipe, check_recipe


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
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        if not self.recipe.products_quantized:
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision=precision, **options)
        return contraction.dot_general(_promoted(lhs, rhs), rhs, dimension_numbers, _precise(self.recipe, precision), **options)


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
    return DotGeneral(check_recipe("dot_general", recipe))


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
        options = {"preferred_element_type": preferred_element_type}
        if out_sharding is not None:
            options["out_sharding"] = out_sharding
        if not self.recipe.products_quantized:
            return jnp.einsum(subscripts, lhs, rhs, precision=precision, **options)
        return contraction.einsum(subscripts, _promoted(lhs, rhs), rhs, _precise(self.recipe, precision), **options)


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
    return Einsum(check_recipe("einsum", recipe))


def _promoted(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The input in the dtype that JAX would compute in; what is no float as it is, to be refused."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs))
    return lhs.astype(jnp.promote_types(lhs.dtype, rhs.dtype)) if floats else lhs


def _precise(recipe: Recipe, precision: jax.lax.PrecisionLike) -> Recipe:
    return recipe if precision is None else recipe.replace(precision=precision)

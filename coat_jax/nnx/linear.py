"""Linear layers and embedding, with the parameters of their `flax.nnx` namesakes. Skins over `coat_jax.ops`."""

from typing import Any

import jax
from flax import nnx

from coat_jax import ops
from coat_jax.flax_arguments import product_recipe
from coat_jax.nnx.parameters import array, given_recipe, takes_recipe
from coat_jax.ops import Recipe
from coat_jax.ops.blocks import plus_bias
from coat_jax.ops.layer_hooks import einsum


@takes_recipe
class FP8Linear(nnx.Linear):
    """y = x W + b like `flax.nnx.Linear`: same arguments, parameters and initial values; the product runs in FP8.

    What is kept for the backward pass is one byte per input element. Under a recipe that quantizes no product this is
    `flax.nnx.Linear` itself.

    Args:
      in_features, out_features, and all options: those of `flax.nnx.Linear`.
      recipe: what input, kernel and gradient are quantized to; None is `recipes.coat()`.

    Raises:
      TypeError: a recipe that is none.
      ValueError: `dot_general` under a recipe that quantizes: the product is the recipe's.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from coat_jax.nnx import FP8Linear
      >>> FP8Linear(3, 4, rngs=nnx.Rngs(0))(jnp.ones((1, 3))).shape
      (1, 4)

    Source: arXiv 2410.19313, section 5.
    """

    recipe: Recipe

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """(..., in_features) to (..., out_features)."""
        if not self.recipe.products_quantized:
            return super().__call__(inputs, out_sharding)
        kernel = self.kernel[...]
        # The kernel is quantized from its own dtype; only the dtype of the computation is taken from the promotion.
        x, _, bias = self.promote_dtype((inputs, kernel, array(self.bias)), dtype=self.dtype)
        options = {"preferred_element_type": self.preferred_element_type, "out_sharding": out_sharding}
        recipe = product_recipe(self, default=jax.lax.dot_general)
        y = ops.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), recipe, **options)
        return plus_bias(y, bias)


@takes_recipe
class FP8LinearGeneral(nnx.LinearGeneral):
    """y = x W + b over any axes like `flax.nnx.LinearGeneral`: same arguments, parameters and initial values.

    Along `batch_axis` every batch has its own kernel, and its own scales.

    Args:
      in_features, out_features, and all options: those of `flax.nnx.LinearGeneral`.
      recipe: as in `FP8Linear`.

    Raises:
      TypeError: a recipe that is none.
      ValueError: `dot_general` or `dot_general_cls` under a recipe that quantizes.
    """

    recipe: Recipe

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The axes `axis` of the inputs contracted, `out_features` behind those that are left."""
        if not self.recipe.products_quantized:
            return super().__call__(inputs, out_sharding)
        kernel, batch = self.kernel[...], tuple(sorted(axis % inputs.ndim for axis in self.batch_axis))
        x, _, bias = self.promote_dtype((inputs, kernel, array(self.bias)), dtype=self.dtype)
        axis, leading = tuple(axis % x.ndim for axis in self.axis), tuple(range(len(batch)))
        numbers = ((axis, tuple(range(len(batch), len(batch) + len(axis)))), (batch, leading))
        options = {"preferred_element_type": self.preferred_element_type, "out_sharding": out_sharding}
        y = ops.dot_general(x, kernel, numbers, product_recipe(self), **options)
        if bias is None or not batch:
            return plus_bias(y, bias)
        return y + bias.reshape(*bias.shape[: len(batch)], *(1,) * (y.ndim - bias.ndim), *bias.shape[len(batch) :])


class FP8Einsum(nnx.Einsum):
    """y = einsum(x, W) + b like `flax.nnx.Einsum`: same arguments, parameters and initial values.

    The kernel is quantized from the dtype of the computation.

    Args:
      einsum_str, kernel_shape, bias_shape, and all options: those of `flax.nnx.Einsum`.
      recipe: as in `FP8Linear`.

    Raises:
      TypeError: a recipe that is none; an `einsum_op`, which is the recipe's.
    """

    def __init__(self, *args: Any, recipe: Recipe | None = None, **options: Any):
        if "einsum_op" in options:
            raise TypeError(f"FP8Einsum: einsum_op={options['einsum_op']!r}; the recipe chooses the product, use nnx.Einsum")
        super().__init__(*args, einsum_op=einsum(given_recipe(self, recipe)), **options)


@takes_recipe
class FP8Embed(nnx.Embed):
    """Rows of a table like `flax.nnx.Embed`: same arguments, parameters and initial values, nothing quantized.

    Only the tokens are kept for the backward pass, where the gradients of a row are summed in float32. Under a recipe that
    quantizes no product this is `flax.nnx.Embed` itself.

    Args:
      num_embeddings, features, and all options: those of `flax.nnx.Embed`.
      recipe: as in `FP8Linear`.
    """

    recipe: Recipe

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Integers (...) to (..., features)."""
        if not self.recipe.products_quantized or out_sharding is not None or self.num_embeddings == 1:
            return super().__call__(inputs, out_sharding)
        table = self.embedding[...]
        (promoted,) = self.promote_dtype((table,), dtype=self.dtype, inexact=False)
        return ops.embedding(inputs, table, dtype=promoted.dtype)

"""Linear layers and embedding. Skins over `coat_jax.ops`: they declare the parameters of their Flax namesakes and call ops."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from coat_jax import ops, recipes
from coat_jax.flax_arguments import product_recipe
from coat_jax.linen.parameters import WithRecipe, declare
from coat_jax.ops import Recipe
from coat_jax.ops.blocks import plus_bias


class FP8Dense(WithRecipe, nn.Dense):
    """y = x W + b like `flax.linen.Dense`: same arguments, parameters and initial values; the product runs in FP8.

    What is kept for the backward pass is one byte per input element. Under a recipe that quantizes no product this is
    `flax.linen.Dense` itself.

    In a compact method Flax calls a module without a name by its class: `FP8Dense_0` where `nn.Dense` was `Dense_0`, and the
    name decides where parameters lie and how they are drawn. To keep a checkpoint or the initial values, give the name:
    `FP8Dense(4, name="Dense_0")`. So for every module here; those assigned in `setup` are called by their attributes anyway.

    Attributes:
      recipe: what input, kernel and gradient are quantized to.

    Raises:
      ValueError: `dot_general` or `dot_general_cls` under a recipe that quantizes: the product is the recipe's.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax import FP8Dense
      >>> x = jnp.ones((1, 3))
      >>> params = FP8Dense(4).init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, params)
      {'params': {'bias': (4,), 'kernel': (3, 4)}}
    """

    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(..., in) to (..., features)."""
        if not self.recipe.products_quantized:
            return super().__call__(inputs)
        recipe = product_recipe(self)
        kernel, bias = declare(self, (jnp.shape(inputs)[-1],), (self.features,))
        # The kernel is quantized from its own dtype; only the dtype of the computation is taken from the promotion.
        x, _, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None
        [y] = ops.linear([x], [kernel], recipe)
        return plus_bias(y, bias)


class FP8DenseGeneral(WithRecipe, nn.DenseGeneral):
    """y = x W + b over any axes like `flax.linen.DenseGeneral`: same arguments, parameters and initial values.

    Along `batch_dims` every batch has its own kernel, and its own scales.

    Attributes:
      recipe: what input, kernel and gradient are quantized to.

    Raises:
      ValueError: `dot_general` or `dot_general_cls` under a recipe that quantizes; `batch_dims` that do not lead.
    """

    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The axes `axis` of the inputs contracted, `features` behind those that are left."""
        if not self.recipe.products_quantized:
            return super().__call__(inputs)
        recipe = product_recipe(self)
        features, axis, batch = (
            (value,) if isinstance(value, int) else tuple(value) for value in (self.features, self.axis, self.batch_dims)
        )
        axis = tuple(i % inputs.ndim for i in axis)
        if batch != tuple(range(len(batch))):
            raise ValueError(f"FP8DenseGeneral: batch_dims={self.batch_dims}; use consecutive leading axes, from 0")
        sizes = tuple(inputs.shape[i] for i in axis)
        kernel, bias = declare(self, sizes, features, inputs.shape[: len(batch)])
        x, _, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None

        def multiply(x, kernel):
            return ops.linear([x], [kernel], recipe, axes=len(axis))[0]

        for _ in batch:
            multiply = jax.vmap(multiply)
        y = multiply(jnp.moveaxis(x, axis, range(-len(axis), 0)), kernel)
        if bias is None or not batch:
            return plus_bias(y, bias)
        return y + bias.reshape(*bias.shape[: len(batch)], *(1,) * (y.ndim - bias.ndim), *features)


class FP8Embed(WithRecipe, nn.Embed):
    """Rows of a table like `flax.linen.Embed`: same arguments, parameters and initial values, nothing quantized.

    Only the tokens are kept for the backward pass, where the gradients of a row are summed in float32. Under a recipe that
    quantizes no product this is `flax.linen.Embed` itself.

    Attributes:
      recipe: see above.
    """

    recipe: Recipe = recipes.coat()

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Integers (...) to (..., features)."""
        if not self.recipe.products_quantized:
            return super().__call__(inputs)
        (promoted,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        assert promoted is not None
        return ops.embedding(inputs, self.embedding, dtype=promoted.dtype)

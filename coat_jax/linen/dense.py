"""Linear layers. Skins over `coat_jax.ops`: they declare the parameters of their Flax namesakes and call the ops."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import ops, recipes
from coat_jax.ops import Recipe


class FP8Dense(nn.Dense):
    """y = x W + b like `flax.linen.Dense`: same arguments, parameters and initial values; the product runs in FP8.

    What is kept for the backward pass is one byte per input element. Under a recipe that quantizes no product this is
    `flax.linen.Dense` itself.

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
        for name in ("dot_general", "dot_general_cls"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"FP8Dense: {name}={getattr(self, name)!r}; the recipe chooses the product, use recipes.bf16()"
                )
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        # The kernel is quantized from its own dtype; only the dtype of the computation is taken from the promotion.
        x, _, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None
        recipe = self.recipe if self.precision is None else self.recipe.replace(precision=self.precision)
        [y] = ops.linear([x], [kernel], recipe)
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


class Kernel(nn.Module):
    """The kernel of a Dense layer without the layer: for blocks in which several layers share one input.

    Attributes:
      features: number of outputs.
      param_dtype: dtype of the kernel.
      kernel_init: initializer.
    """

    features: int
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()

    @nn.compact
    def __call__(self, inputs: int) -> jax.Array:
        """The kernel (inputs, features), in its own dtype."""
        return self.param("kernel", self.kernel_init, (inputs, self.features), self.param_dtype)

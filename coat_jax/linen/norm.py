"""Norms. Skins over `coat_jax.ops`."""

import functools
from typing import Any

import jax
from flax import linen as nn
from flax.linen import dtypes

from coat_jax import ops, recipes
from coat_jax.flax_arguments import refuse_beyond_last_axis
from coat_jax.linen.parameters import WithRecipe
from coat_jax.ops import Recipe


def declare_norm(module: Any, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """The scale and, of a LayerNorm, bias of a norm over the last axis.

    Raises:
      ValueError: an option of the Flax namesake that goes beyond that.
    """
    refuse_beyond_last_axis(module, x.ndim, mask)
    shape = (x.shape[-1],)
    scale = module.param("scale", module.scale_init, shape, module.param_dtype) if module.use_scale else None
    if not getattr(module, "use_bias", False):
        return (scale, None)
    return scale, module.param("bias", module.bias_init, shape, module.param_dtype)


class FP8RMSNorm(WithRecipe, nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + epsilon) * scale like `flax.linen.RMSNorm`, keeping FP8 of x for the backward pass.

    Attributes:
      recipe: what is kept of x; a recipe that quantizes no non-linear input makes this `flax.linen.RMSNorm` itself.

    Raises:
      ValueError: a mask, an axis name or axes other than the last, under a recipe that quantizes.
    """

    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """(..., features) to the same shape."""
        if self.recipe.nonlinear_input is None:
            return super().__call__(x, mask=mask)
        scale, _ = declare_norm(self, x, mask)
        dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
        return ops.rms_norm(x, scale, self.recipe, eps=self.epsilon, dtype=dtype)


class FP8LayerNorm(WithRecipe, nn.LayerNorm):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias like `flax.linen.LayerNorm`, keeping FP8 of x.

    Attributes:
      recipe: what is kept of x; a recipe that quantizes no non-linear input makes this `flax.linen.LayerNorm` itself.

    Raises:
      ValueError: a mask, an axis name or axes other than the last, under a recipe that quantizes.
    """

    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """(..., features) to the same shape."""
        if self.recipe.nonlinear_input is None:
            return super().__call__(x, mask=mask)
        scale, bias = declare_norm(self, x, mask)
        dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        norm = functools.partial(ops.layer_norm, eps=self.epsilon, dtype=dtype, fast_variance=self.use_fast_variance)
        return norm(x, scale, bias, self.recipe)

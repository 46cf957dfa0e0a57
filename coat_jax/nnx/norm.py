"""Norms. Skins over `coat_jax.ops`."""

import jax
from flax import nnx
from flax.linen import dtypes

from coat_jax import ops
from coat_jax.flax_arguments import refuse_beyond_last_axis
from coat_jax.nnx.parameters import array, takes_recipe
from coat_jax.ops import Recipe


@takes_recipe
class FP8RMSNorm(nnx.RMSNorm):
    """y = x / sqrt(mean(x^2) + epsilon) * scale like `flax.nnx.RMSNorm`, keeping FP8 of x for the backward pass.

    Args:
      num_features, and all options: those of `flax.nnx.RMSNorm`.
      recipe: what is kept of x; one that quantizes no non-linear input makes this `flax.nnx.RMSNorm` itself. None is
        `recipes.coat()`.

    Raises:
      TypeError: a recipe that is none.
      ValueError: a mask, an axis name or axes other than the last, under a recipe that quantizes.
    """

    recipe: Recipe

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """(..., features) to the same shape."""
        if self.recipe.nonlinear_input is None:
            return super().__call__(x, mask=mask)
        refuse_beyond_last_axis(self, x.ndim, mask)
        scale = array(self.scale)
        dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
        return ops.rms_norm(x, scale, self.recipe, eps=self.epsilon, dtype=dtype)


@takes_recipe
class FP8LayerNorm(nnx.LayerNorm):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias like `flax.nnx.LayerNorm`, keeping FP8 of x.

    Args:
      num_features, and all options: those of `flax.nnx.LayerNorm`.
      recipe: as in `FP8RMSNorm`.

    Raises:
      TypeError: a recipe that is none.
      ValueError: a mask, an axis name or axes other than the last, under a recipe that quantizes.
    """

    recipe: Recipe

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """(..., features) to the same shape."""
        if self.recipe.nonlinear_input is None:
            return super().__call__(x, mask=mask)
        refuse_beyond_last_axis(self, x.ndim, mask)
        scale, bias = array(self.scale), array(self.bias)
        dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        fast = self.use_fast_variance
        return ops.layer_norm(x, scale, bias, self.recipe, eps=self.epsilon, dtype=dtype, fast_variance=fast)

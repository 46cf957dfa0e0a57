"""Norms. Skins over `coat_jax.ops`."""

import jax
from flax import linen as nn

from coat_jax import ops, recipes
from coat_jax.ops import Recipe


class FP8RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + epsilon) * scale like `flax.linen.RMSNorm`, keeping FP8 of x for the backward pass.

    Attributes:
      recipe: what is kept of x; a recipe that quantizes no non-linear input makes this `flax.linen.RMSNorm` itself.

    Raises:
      ValueError: another option than `epsilon`, dtypes and scale away from its default, under a recipe that quantizes.
    """

    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """(..., features) to the same shape."""
        if self.recipe.nonlinear_input is None:
            return super().__call__(x, mask=mask)
        given = {"mask": mask, "axis_name": self.axis_name, "axis_index_groups": self.axis_index_groups}
        given |= {name: None if axes in (-1, (-1,), x.ndim - 1) else axes for name, axes in self._axes().items()}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"FP8RMSNorm: {name}={value!r}; FP8 norms run over the last axis alone, use recipes.bf16()")
        scale = self.param("scale", self.scale_init, (x.shape[-1],), self.param_dtype) if self.use_scale else None
        dtype = nn.dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
        return ops.rms_norm(x, scale, self.recipe, eps=self.epsilon, dtype=dtype)

    def _axes(self):
        return {"reduction_axes": self.reduction_axes, "feature_axes": self.feature_axes}

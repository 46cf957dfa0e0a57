"""Norms over the last axis. Each formula once, as a prologue for `linear`, and as an op that keeps its input in FP8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.ops.recipe import Recipe
from coat_jax.ops.stash import stashed


def normalize_rms(x: jax.Array, weight: jax.Array | None, *, eps: float, dtype: Any = None) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis, in float32, plain."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jax.lax.square(x32), -1, keepdims=True) + eps)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (x32 * scale).astype(x.dtype if dtype is None else dtype)


def rms_norm(x: jax.Array, weight: jax.Array | None, recipe: Recipe, *, eps: float = 1e-6, dtype: Any = None) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis; x is kept as `recipe.nonlinear_input`.

    Args:
      x: (..., features), any float dtype; computed in float32.
      weight: (features,), or None for 1.
      recipe: what is kept of x; None there leaves it to plain autodiff.
      eps: added to the mean square.
      dtype: of the result; None is x's.

    Returns:
      An array of x's shape.

    Source: arXiv 1910.07467.
    """
    formula = functools.partial(normalize_rms, eps=eps, dtype=dtype)
    if recipe.nonlinear_input is None:
        return formula(x, weight)
    return stashed(formula, [recipe.nonlinear_input])(x, weight)

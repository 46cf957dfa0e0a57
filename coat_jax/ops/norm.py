"""Norms over the last axis: each formula plain, as a prologue for `linear`, and as an op that keeps its input in FP8."""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.ops.norm_kernels import Mean, NormFunction, mean_of_row
from coat_jax.ops.recipe import Recipe
from coat_jax.ops.stash import nonlinear


class NormKind(enum.StrEnum):
    """The norms of a Transformer block."""

    RMS = "rms"
    """RMSNorm with a scale."""
    LAYER = "layer"
    """LayerNorm without parameters, as OLMo has it."""

    @classmethod
    def resolve(cls, name: str) -> "NormKind":
        """The member of that name.

        Raises:
          ValueError: an unknown name.
        """
        if name not in tuple(cls):
            raise ValueError(f"norm={name!r} is unknown; use {' or '.join(repr(str(kind)) for kind in cls)}")
        return cls(name)


def _row(x: jax.Array, parameter: jax.Array) -> jax.Array:
    """A parameter of a row of x, float32, with as many axes as x."""
    return parameter.astype(jnp.float32).reshape((1,) * (x.ndim - parameter.ndim) + parameter.shape)


def normalize_rms(
    x: jax.Array, weight: jax.Array | None = None, *, eps: float, dtype: Any = None, mean: Mean = mean_of_row
) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * weight, plain; `mean` is that of the row that an element is in."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(mean(jax.lax.square(x32)) + eps)
    if weight is not None:
        scale = scale * _row(x, weight)
    return (x32 * scale).astype(x.dtype if dtype is None else dtype)


def normalize_layer(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    dtype: Any = None,
    fast_variance: bool = False,
    mean: Mean = mean_of_row,
) -> jax.Array:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, plain; `mean` is that of the row that an element is in."""
    x32 = x.astype(jnp.float32)
    center = mean(x32)
    if fast_variance:
        variance = jnp.maximum(0.0, mean(jax.lax.square(x32)) - jax.lax.square(center))
    else:
        variance = mean(jax.lax.square(x32 - center))
    scale = jax.lax.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * _row(x, weight)
    y = (x32 - center) * scale
    if bias is not None:
        y = y + _row(x, bias)
    return y.astype(x.dtype if dtype is None else dtype)


def rms_norm(x: jax.Array, weight: jax.Array | None, recipe: Recipe, *, eps: float = 1e-6, dtype: Any = None) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis; x is kept as `recipe.nonlinear_input`.

    Args:
      x: (..., features), any float dtype; computed in float32.
      weight: (features,), or None for 1.
      recipe: what is kept of x, and who computes: left to the library, a kernel on one Hopper GPU, which reads x once, and XLA
        elsewhere. None for what is kept leaves it to plain autodiff.
      eps: added to the mean square.
      dtype: of the result; None is x's.

    Returns:
      An array of x's shape.

    Raises:
      ValueError: the recipe names kernels, and there is none for such rows: kernels take 1024, 2048, ... 8192 bfloat16
        features in groups of 128 with bfloat16 scales, and multiples of fewer in smaller groups.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> print(ops.rms_norm(jnp.array([[3.0, -3.0]]), None, recipes.coat()).round(3))
      [[ 1. -1.]]

    Source: arXiv 1910.07467.
    """
    formula = functools.partial(normalize_rms, eps=eps, dtype=dtype)
    return nonlinear(NormFunction(formula, alone=True, called="rms_norm"), [x], recipe, weight)


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    recipe: Recipe,
    *,
    eps: float = 1e-6,
    dtype: Any = None,
    fast_variance: bool = False,
) -> jax.Array:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis; x is kept as `recipe.nonlinear_input`.

    Args:
      x: (..., features), any float dtype; computed in float32.
      weight, bias: (features,), or None for 1 and 0.
      recipe: as in `rms_norm`.
      eps: added to the variance.
      dtype: of the result; None is x's.
      fast_variance: mean(x^2) - mean(x)^2 in one pass, which loses what a large mean hides.

    Returns:
      An array of x's shape.

    Raises:
      ValueError: as in `rms_norm`.

    Source: arXiv 1607.06450.
    """
    formula = functools.partial(normalize_layer, eps=eps, dtype=dtype, fast_variance=fast_variance)
    return nonlinear(NormFunction(formula, alone=True, called="layer_norm"), [x], recipe, weight, bias)

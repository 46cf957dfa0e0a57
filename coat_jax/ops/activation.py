"""Elementwise functions between linear layers, their inputs kept in FP8."""

import jax

from coat_jax.ops.recipe import Recipe
from coat_jax.ops.stash import stashed


def gate_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """y = silu(gate) * up, plain."""
    return jax.nn.silu(gate) * up


def swiglu(gate: jax.Array, up: jax.Array, recipe: Recipe) -> jax.Array:
    """y = silu(gate) * up with silu(a) = a / (1 + exp(-a)); gate and up are kept as `recipe.nonlinear_input`.

    Args:
      gate, up: arrays of one shape and float dtype.
      recipe: what is kept; None there leaves it to plain autodiff.

    Returns:
      An array of the same shape and dtype.

    Source: arXiv 2002.05202.
    """
    if recipe.nonlinear_input is None:
        return gate_silu(gate, up)
    return stashed(gate_silu, [recipe.nonlinear_input] * 2)(gate, up)

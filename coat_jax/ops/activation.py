"""Functions between linear layers, element by element; their inputs are kept in FP8 for the backward pass."""

import functools

import jax

from coat_jax.ops.elementwise import Elementwise
from coat_jax.ops.recipe import Recipe
from coat_jax.ops.stash import nonlinear


def gate_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """y = silu(gate) * up, plain."""
    return jax.nn.silu(gate) * up


def silu(x: jax.Array, recipe: Recipe) -> jax.Array:
    """y = x / (1 + exp(-x)); x is kept as `recipe.nonlinear_input`, None there leaves it to plain autodiff.

    Source: arXiv 1702.03118.
    """
    return nonlinear(Elementwise(jax.nn.silu, called="silu"), [x], recipe)


def gelu_function(approximate: bool) -> Elementwise:
    """x Phi(x), or its tanh approximation, plain."""
    refused = None if approximate else "has no kernel with an error function, which approximate=True does without"
    return Elementwise(functools.partial(jax.nn.gelu, approximate=approximate), refused, called="gelu")


def gelu(x: jax.Array, recipe: Recipe, *, approximate: bool = True) -> jax.Array:
    """y = x Phi(x), Phi the normal distribution or its tanh approximation; x is kept as `recipe.nonlinear_input`.

    Source: arXiv 1606.08415.
    """
    return nonlinear(gelu_function(approximate), [x], recipe)


def multiply(a: jax.Array, b: jax.Array, recipe: Recipe) -> jax.Array:
    """y = a * b, arrays of one shape; both are kept as `recipe.nonlinear_input`.

    Raises:
      ValueError: different shapes.
    """
    same_shape("multiply", a, b)
    return nonlinear(Elementwise(jax.lax.mul, called="multiply"), [a, b], recipe)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, arrays of one shape: the residual stream, exact. Nothing is kept.

    Raises:
      ValueError: different shapes.
    """
    same_shape("add", x, y)
    return x + y


def swiglu(gate: jax.Array, up: jax.Array, recipe: Recipe) -> jax.Array:
    """y = silu(gate) * up; gate and up are kept as `recipe.nonlinear_input`, silu(gate) is redone.

    Args:
      gate, up: arrays of one shape and float dtype.
      recipe: what is kept; None there leaves it to plain autodiff.

    Returns:
      An array of the same shape and dtype.

    Raises:
      ValueError: different shapes.

    Source: arXiv 2002.05202.
    """
    same_shape("swiglu", gate, up)
    return nonlinear(Elementwise(gate_silu, called="swiglu"), [gate, up], recipe)


def same_shape(op: str, a: jax.Array, b: jax.Array) -> None:
    """Raises ValueError where a and b differ in shape: a sum over broadcast axes would need care that no op here takes."""
    if a.shape != b.shape:
        raise ValueError(f"{op}: shapes {a.shape} and {b.shape} differ; broadcast one of them first")

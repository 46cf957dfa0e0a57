"""What an output of a traced function is computed from: which input leaves, by following the equations of its jaxpr."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from pallas_kernels import jaxprs

Sources = frozenset[int]
"""Positions of input leaves."""


def _of_results(equation: core.JaxprEqn, inputs: list[Sources]) -> list[Sources]:
    if equation.primitive.name == "optimization_barrier":  # it orders values and computes none
        return inputs
    return [frozenset().union(*inputs)] * len(equation.outvars)


def sources(fn: Callable, *args: Any) -> list[Sources]:
    """For every leaf that `fn(*args)` returns, the positions among the leaves of `args` that it is computed from.

    An equation's outputs depend on all its inputs; a called function is followed inside. Nothing is computed.

    Example:
      >>> import jax.numpy as jnp
      >>> sources(lambda a, b: {"sum": a + b, "b": jnp.sin(b)}, 1.0, 2.0)
      [frozenset({1}), frozenset({0, 1})]
    """
    closed = jax.make_jaxpr(fn)(*args)
    inputs = [frozenset({i}) for i in range(len(closed.jaxpr.invars))]
    return jaxprs.follow(closed.jaxpr, closed.consts, inputs, _of_results, constant=lambda _: frozenset())


def used(fn: Callable, *args: Any) -> Sources:
    """Positions among the leaves of `args` that any output of `fn(*args)` is computed from."""
    return frozenset().union(*sources(fn, *args))

"""What an output of a traced function is computed from: which input leaves, by following the equations of its jaxpr."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

Sources = frozenset[int]
"""Positions of input leaves."""


def _follow(jaxpr: core.Jaxpr, sources: list[Sources]) -> list[Sources]:
    found = dict(zip(jaxpr.invars, sources, strict=True))

    def of(atom: Any) -> Sources:
        return frozenset() if isinstance(atom, core.Literal) else found.get(atom, frozenset())

    for equation in jaxpr.eqns:
        inputs = [of(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr")
        called = getattr(inner, "jaxpr", inner)
        if called is not None and len(called.invars) == len(inputs) and not _repeats(equation):
            outputs = _follow(called, inputs)
        else:
            outputs = [frozenset().union(*inputs)] * len(equation.outvars)
        found.update(zip(equation.outvars, outputs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _repeats(equation: core.JaxprEqn) -> bool:
    """Whether the inner jaxpr runs more than once, so that its outputs come back as inputs."""
    return "num_carry" in equation.params


def sources(fn: Callable, *args: Any) -> list[Sources]:
    """For every leaf that `fn(*args)` returns, the positions among the leaves of `args` that it is computed from.

    An equation's outputs depend on all its inputs, a called function is followed inside. Nothing is computed.

    Example:
      >>> import jax.numpy as jnp
      >>> sources(lambda a, b: {"sum": a + b, "b": jnp.sin(b)}, 1.0, 2.0)
      [frozenset({1}), frozenset({0, 1})]
    """
    closed = jax.make_jaxpr(fn)(*args)
    return _follow(closed.jaxpr, [frozenset({i}) for i in range(len(closed.jaxpr.invars))])


def used(fn: Callable, *args: Any) -> Sources:
    """Positions among the leaves of `args` that any output of `fn(*args)` is computed from."""
    return frozenset().union(*sources(fn, *args))

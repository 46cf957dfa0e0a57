"""What an output of a traced function is computed from: which input leaves, by following the equations of its jaxpr."""

from collections.abc import Callable, Sequence
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
        inside = called(equation) or plain_of(equation)
        if inside is not None:
            outputs = _follow(inside[0], inputs)
        elif equation.primitive.name == "optimization_barrier":  # it orders values and computes none
            outputs = inputs
        else:
            outputs = [frozenset().union(*inputs)] * len(equation.outvars)
        found.update(zip(equation.outvars, outputs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def called(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """The jaxpr and constants that the equation calls once, input for input; None where it is no plain call."""
    closed = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    jaxpr = getattr(closed, "jaxpr", closed)
    # In a scan outputs come back as inputs.
    if jaxpr is None or "num_carry" in equation.params or not hasattr(jaxpr, "eqns"):
        return None
    return (jaxpr, getattr(closed, "consts", ())) if len(jaxpr.invars) == len(equation.invars) else None


def plain_of(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """Jaxpr and constants of the plain function beside a kernel that is chosen when a program's target is known; else None."""
    if equation.primitive.name != "kernel_by_target":
        return None
    closed = jax.make_jaxpr(equation.params["plain"])(*(atom.aval for atom in equation.invars))
    return closed.jaxpr, closed.consts


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

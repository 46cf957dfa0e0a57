"""Naming register layouts inside a traced function, so that the compiler has none to search for.

The layout inference of Mosaic GPU searches where reductions and broadcasts leave a choice, for minutes in the worst case,
and may find nothing. In a function of tiles there is no choice: values have one layout, numbers per group the reduced one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.backend import plgpu

_REDUCTIONS = ("reduce_max", "reduce_min", "reduce_sum")
_CHOICES = (*_REDUCTIONS, "broadcast_in_dim", "iota")
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def annotated(fn: Callable[..., Any], layouts: Mapping[tuple[int, ...], Any]) -> Callable[..., Any]:
    """fn, whose intermediate arrays of a shape in `layouts` have that layout.

    Args:
      fn: a function of arrays and trees of arrays.
      layouts: shape -> layout.
    """

    def call(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), layouts)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return call


def _evaluate(jaxpr: Any, consts: Any, args: Any, layouts: Mapping[tuple[int, ...], Any]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.core.Literal) else values[atom]

    def named(results: list[Any]) -> list[Any]:
        return [plgpu.layout_cast(y, layouts[y.shape]) if y.shape in layouts else y for y in results]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
            results = _evaluate(inner.jaxpr, inner.consts, operands, layouts)
        elif eqn.primitive.name == "sqrt" and not backend.has_sqrt:
            results = [jnp.where(operands[0] > 0, operands[0] * jax.lax.rsqrt(operands[0]), operands[0])]
        elif eqn.primitive.name == "add_any":  # of a derivative; the backend has the plain sum only
            results = [jax.lax.add(*operands)]
        elif eqn.primitive.name in _REDUCTIONS and len(eqn.params["axes"]) > 1:  # the backend has one axis at a time
            results = operands
            for done, axis in enumerate(sorted(eqn.params["axes"])):
                results = named([eqn.primitive.bind(*results, **eqn.params | {"axes": (axis - done,)})])
        else:
            made = eqn.primitive.bind(*operands, **eqn.params)
            results = made if eqn.primitive.multiple_results else [made]
            results = named(results) if eqn.primitive.name in _CHOICES else results
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

"""Naming register layouts inside a traced function, so that the compiler has none to search for.

The layout inference of Mosaic GPU searches where reductions and broadcasts leave a choice, for minutes in the worst case,
and may find nothing. In a function of tiles there is no choice: values have one layout, numbers per group the reduced one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

from pallas_kernels import backend, jaxprs
from pallas_kernels.backend import plgpu

_REDUCTIONS = ("reduce_max", "reduce_min", "reduce_sum")
_CHOICES = (*_REDUCTIONS, "broadcast_in_dim", "iota")


def annotated(fn: Callable[..., Any], layouts: Mapping[tuple[int, ...], Any], *, again: bool = False) -> Callable[..., Any]:
    """fn, whose intermediate arrays of a shape in `layouts` have that layout.

    Args:
      fn: a function of arrays and trees of arrays.
      layouts: shape -> layout.
      again: load and compute again behind a reduction to one number what is needed before and behind it, rather than hold it
        in registers meanwhile.

    Returns:
      A function of functions without arguments that load fn's arguments.
    """

    def call(*loads: Callable[[], Any]) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*(jax.eval_shape(load) for load in loads))
        results = _Evaluation(closed.jaxpr, closed.consts, loads, layouts, again).results()
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return call


class _Evaluation:
    """A jaxpr, evaluated in its order, or on demand between its reductions to one number."""

    def __init__(self, jaxpr: Any, consts: Any, loads: Any, layouts: Mapping[tuple[int, ...], Any], again: bool):
        self.jaxpr, self.layouts = jaxpr, layouts
        self.values = dict(zip(jaxpr.constvars, consts, strict=True))
        self.loads = dict(zip(jaxpr.invars, loads, strict=True))
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.numbers = [v for v, eqn in self.makers.items() if eqn.primitive.name in _REDUCTIONS and not v.aval.shape]
        self.again = again and bool(self.numbers)

    def results(self) -> list[Any]:
        for var in self.numbers if self.again else self.makers:
            self.read(var)
            if self.again:
                self.values = {var: x for var, x in self.values.items() if var in self.jaxpr.constvars or x.ndim < 2}
        return [self.read(atom) for atom in self.jaxpr.outvars]

    def read(self, atom: Any) -> Any:
        if isinstance(atom, jex.core.Literal):
            return atom.val
        if atom not in self.values and atom in self.loads:
            self.values[atom] = self.loaded(self.loads[atom]())
        elif atom not in self.values:
            eqn = self.makers[atom]
            inner, operands = jaxprs.called(eqn), [self.read(operand) for operand in eqn.invars]
            results = self.evaluate(eqn, operands) if inner is None else jaxprs.follow(*inner, operands, self.evaluate)
            self.values.update(zip(eqn.outvars, results, strict=True))
        return self.values[atom]

    def loaded(self, value: Any) -> Any:
        """A value from shared memory; the barrier keeps the compiler from holding on to what it loaded before."""
        return jax.lax.optimization_barrier(value) if self.again and value.ndim == 2 else value

    def evaluate(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The results of an equation that calls nothing."""
        name = eqn.primitive.name
        if name == "add_any":  # of a derivative; the backend has the plain sum only
            return [jax.lax.add(*operands)]
        if name == "sqrt" and not backend.has_sqrt:
            return [jnp.where(operands[0] > 0, operands[0] * jax.lax.rsqrt(operands[0]), operands[0])]
        if name in _REDUCTIONS and len(eqn.params["axes"]) > 1:  # the backend has one axis at a time
            [x] = operands
            for done, axis in enumerate(sorted(eqn.params["axes"])):
                x = self.named(eqn.primitive.bind(x, **eqn.params | {"axes": (axis - done,)}))
            return [x]
        made = eqn.primitive.bind(*operands, **eqn.params)
        results = made if eqn.primitive.multiple_results else [made]
        if name == "load":
            return [self.loaded(y) for y in results]
        return [self.named(y) for y in results] if name in _CHOICES else list(results)

    def named(self, value: Any) -> Any:
        """A value in the layout of its shape."""
        return plgpu.layout_cast(value, self.layouts[value.shape]) if value.shape in self.layouts else value

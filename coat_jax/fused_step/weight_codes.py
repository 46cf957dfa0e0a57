"""Codes of weights, made once and used by several micro-batches: for any function, by following its jaxpr.

What a layer computes from its parameters alone is the same for every micro-batch. `codes` makes the part of it that is worth
keeping, what was rounded to one byte per element and the scales that came of a reduction, and `using` runs the function with
these. Nothing that they were made from is evaluated again, so no weight is quantized inside a loop over micro-batches.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from pallas_kernels import jaxprs

Codes = dict[str, jax.Array]
"""Values by the name of their computation. Equal computations, in whatever function, have one name."""

_WEIGHT = "weight"
_REDUCED = 64  # a result this many times smaller than what it was made from is a scale


class _Fixed:
    """A value that depends on parameters and constants alone; evaluated when it is read, and once.

    Attributes:
      name: a hash of the computation.
      kept: whether it belongs among codes.
      parents: the values of the same kind that it is made from.
    """

    def __init__(self, name: str, aval: Any, parents: Sequence["_Fixed"], make: Callable[[], Any]):
        self.name, self.parents, self._make = name, parents, make
        self.nbytes, self.one_byte = aval.size * aval.dtype.itemsize, aval.dtype.itemsize == 1 and aval.dtype != bool
        self.of_weights: bool = name.startswith(_WEIGHT) or any(parent.of_weights for parent in parents)
        made_of = [parent for parent in parents if parent.of_weights]
        rounded = self.one_byte and not any(parent.one_byte for parent in made_of)
        reduced = self.nbytes * _REDUCED <= max((parent.nbytes for parent in made_of), default=0)
        self.kept = bool(made_of) and (rounded or reduced)

    def value(self, codes: Codes) -> Any:
        """The value, from `codes` where it is there."""
        if self.name not in codes:
            codes[self.name] = self._make()
        return codes[self.name]


class _Walk:
    """A walk through a jaxpr that leaves `_Fixed` values unevaluated until `read` wants them.

    Attributes:
      read: of a `_Fixed`, its value; None while nothing but `_Fixed` values is known.
      codes: values found already; grows.
    """

    def __init__(self, read: Callable[[_Fixed], Any], codes: Codes):
        self.read, self.codes = read, codes

    def outputs(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """What the jaxpr's outputs are: arrays, `_Fixed`, or None for unknown."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def get(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            inputs = [get(atom) for atom in equation.invars]
            called = None if _untraced(equation) else jaxprs.called(equation)
            if called is not None:
                results = self.outputs(*called, inputs)
            elif all(isinstance(x, _Fixed) or _is_constant(x) for x in inputs):
                results = self._fix(equation, inputs)
            else:
                given = [self.read(x) if isinstance(x, _Fixed) else x for x in inputs]
                unknown = any(x is None for x in given)
                results = [None] * len(equation.outvars) if unknown else _evaluate(equation, given)
            values.update(zip(equation.outvars, results, strict=True))
        return [get(atom) for atom in jaxpr.outvars]

    def _fix(self, equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[_Fixed]:
        parents = [x for x in inputs if isinstance(x, _Fixed)]
        made_from = [x.name if isinstance(x, _Fixed) else repr(np.asarray(x)) for x in inputs]
        # Functions among the parameters print as addresses, new in every trace; what they compute does not.
        plain = jaxprs.called(equation) if _untraced(equation) else None
        text = f"{equation.primitive} {plain or equation.params} {made_from}"
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        results: list[Any] = []

        def make(i: int) -> Any:
            if not results:
                results.extend(_evaluate(equation, [x.value(self.codes) if isinstance(x, _Fixed) else x for x in inputs]))
            return results[i]

        made = [functools.partial(make, i) for i in range(len(equation.outvars))]
        return [_Fixed(f"{name}.{i}", atom.aval, parents, made[i]) for i, atom in enumerate(equation.outvars)]


def _untraced(equation: core.JaxprEqn) -> bool:
    return any(isinstance(held, jaxprs.Untraced) for held in equation.params.values())


def _itself(x: Any) -> Any:
    return x


def _is_constant(x: Any) -> bool:
    """Whether x is a number that is known while tracing."""
    return x is not None and not isinstance(x, jax.core.Tracer) and np.size(x) == 1


def _evaluate(equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    result = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(result) if equation.primitive.multiple_results else [result]


def _walk(walk: _Walk, fn: Callable, row: Any, rest: tuple, known: bool) -> tuple[list[Any], Any]:
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(row, *rest)
    leaves = jax.tree.leaves(row)
    roots = [_Fixed(f"{_WEIGHT} {i}", leaf, (), functools.partial(_itself, leaf)) for i, leaf in enumerate(leaves)]
    others = jax.tree.leaves(rest) if known else [None] * len(jax.tree.leaves(rest))
    consts = [x if known or _is_constant(x) else None for x in closed.consts]
    outputs = walk.outputs(closed.jaxpr, consts, [*roots, *others])
    return [walk.read(x) if isinstance(x, _Fixed) else x for x in outputs], jax.tree.structure(shapes)


def codes(fn: Callable, row: Any, *rest: Any) -> Codes:
    """The codes of the weights `row` that fn(row, *rest) uses; of `rest` only shapes and dtypes matter.

    Example:
      >>> import jax.numpy as jnp
      >>> def layer(w, x):
      ...     scale = jnp.max(jnp.abs(w)) / 448
      ...     return x @ ((w / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale)
      >>> w, x = jnp.ones((16, 16)), jnp.ones((4, 16))
      >>> made = codes(layer, w, x)
      >>> sorted((str(code.dtype), code.shape) for code in made.values())
      [('float32', ()), ('float8_e4m3fn', (16, 16))]
      >>> (using(layer, made, w, x) == layer(w, x)).all()
      Array(True, dtype=bool)
    """
    needed: dict[str, _Fixed] = {}

    def need(value: _Fixed) -> None:
        if value.kept:
            needed[value.name] = value
        else:
            for parent in value.parents:
                need(parent)

    made: Codes = {}
    _walk(_Walk(need, made), fn, row, rest, known=False)
    return {name: value.value(made) for name, value in needed.items()}


def using(fn: Callable, made: Codes, row: Any, *rest: Any) -> Any:
    """fn(row, *rest), with what `codes` made of the same row."""
    found = dict(made)
    outputs, tree = _walk(_Walk(lambda value: value.value(found), found), fn, row, rest, known=True)
    return jax.tree.unflatten(tree, outputs)

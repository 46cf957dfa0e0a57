"""A backward pass that hands out the gradients of one layer at a time, so that they never exist together.

The forward scan keeps, for each layer, what its backward pass needs and cannot have again from the layer's parameters
alone; the reverse scan makes the rest again. What is done with the gradients of a layer, and which trees are updated in
place meanwhile, is the caller's `visit`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.train import dependence
from coat_jax.train.parts import Batch, Params, Parts, alone, hide, show, stacked


@dataclasses.dataclass(frozen=True)
class Tape:
    """A forward pass, ready to be walked backward any number of times.

    Attributes:
      loss: float32 scalar.
      layers: number of layers.
    """

    loss: jax.Array
    layers: int
    _parts: Parts
    _batch: Batch
    _outer: Params
    _trained: Any
    _kept: Any
    _from_row: tuple[bool, ...]
    _cotangent: Any
    _outer_pulls: tuple[Callable, Any]

    @classmethod
    def record(cls, parts: Parts, params: Params, batch: Batch, trained: Any) -> "Tape":
        """Runs the model forward.

        Args:
          trained: a tree of bools like params; where False, no gradient is computed.
        """
        trained_rows, trained_outer = parts.split(trained)
        rows, outer = parts.split(params)

        def differentiable(fn: Callable) -> Callable:
            return lambda o, *rest: fn(show(trained_outer, o, outer), *rest, batch)

        shown = hide(trained_outer, outer)
        x, pull_embed = _pull_used(differentiable(parts.embed), shown)
        layer = _layer_vjp(parts, batch, trained_rows)
        row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
        n = len(jax.tree.leaves(row))
        from_row = tuple(
            max(s, default=-1) < n for s in dependence.sources(lambda r, x: jax.tree.leaves(layer(r, x)[1]), row, x)
        )

        def forward(x: Any, row: Params) -> tuple[Any, list]:
            y, pull = layer(row, x)
            _check_same(x, y)
            return y, [leaf for leaf, again in zip(jax.tree.leaves(pull), from_row, strict=True) if not again]

        x, kept = jax.lax.scan(forward, x, rows)
        loss, pull_loss = _pull_used(differentiable(parts.loss), shown, x)
        if loss.shape != ():
            raise TypeError(f"Parts.loss: returned shape {loss.shape}; a loss is a scalar, the mean over the batch")
        d_head, cotangent = pull_loss(jnp.ones_like(loss))
        return cls(
            loss, parts.layers(params), parts, batch, shown, trained_rows, kept, from_row, cotangent, (pull_embed, d_head)
        )

    def walk(self, visit: Callable, carry: Any, row_of: Callable[[Any, jax.Array], Params]) -> tuple[Any, Any, Params]:
        """Walks back from the last layer to the first, then to the embedding.

        Args:
          visit: (carry, i, gradients of layer i as a stack of one) -> (carry, what to collect).
          carry: what the visits update in place.
          row_of: (carry, i) -> parameters of layer i as the forward pass had them, as a stack of one. Where the visits update
            the parameters, it reads them from the carry: a second tree of them outside would be a second copy in memory.

        Returns:
          The last carry, what was collected with the layers as first axis, and the gradients of the outer parameters.
        """
        layer = _layer_vjp(self._parts, self._batch, self._trained)

        def body(state: tuple[Any, Any], inputs: tuple[jax.Array, list]) -> tuple[tuple[Any, Any], Any]:
            cotangent, carry = state
            i, kept = inputs
            # The cotangent stands in for x: only what does not depend on x is read from this second trace.
            leaves, tree = jax.tree.flatten(layer(alone(row_of(carry, i)), cotangent)[1])
            rest = iter(kept)
            pull = jax.tree.unflatten(
                tree, [x if again else next(rest) for x, again in zip(leaves, self._from_row, strict=True)]
            )
            grads, cotangent = pull(cotangent)
            carry, collected = visit(carry, i, stacked(grads))
            return (cotangent, carry), collected

        pull_embed, d_head = self._outer_pulls
        inputs = (jnp.arange(self.layers), self._kept)
        (cotangent, carry), collected = jax.lax.scan(body, (self._cotangent, carry), inputs, reverse=True)
        return carry, collected, _add(pull_embed(cotangent)[0], d_head, self._outer)


def _layer_vjp(parts: Parts, batch: Batch, trained: Any) -> Callable:
    """(row, x) -> (y, pull), differentiated in the trained leaves of the row and in x."""

    def vjp(row: Params, x: Any) -> tuple[Any, Callable]:
        return jax.vjp(lambda t, x: parts.layer(show(trained, t, row), x, batch), hide(trained, row), x)

    return vjp


def _pull_used(fn: Callable, outer: Params, *rest: Any) -> tuple[Any, Callable]:
    """`jax.vjp`, with None instead of zeros for the leaves of `outer` that fn does not read."""
    leaves, tree = jax.tree.flatten(outer)
    read = dependence.used(fn, outer, *rest)
    chosen = [i for i in range(len(leaves)) if i in read]

    def of_chosen(some: list, *rest: Any) -> Any:
        every = dict(enumerate(leaves)) | dict(zip(chosen, some, strict=True))
        return fn(jax.tree.unflatten(tree, every.values()), *rest)

    value, pull = jax.vjp(of_chosen, [leaves[i] for i in chosen], *rest)

    def spread(cotangent: Any) -> tuple:
        some, *others = pull(cotangent)
        found = dict(zip(chosen, some, strict=True))
        return (jax.tree.unflatten(tree, [found.get(i) for i in range(len(leaves))]), *others)

    return value, spread


def _add(first: Params, second: Params, like: Params) -> Params:
    """The sum of two gradients where there are two, the one where there is one, zeros where there is none."""

    def add(x: jax.Array, *grads: jax.Array | None) -> jax.Array:
        there = [grad for grad in grads if grad is not None]
        return sum(there[1:], there[0]) if there else jnp.zeros_like(x)

    return jax.tree.map(add, like, first, second)


def _check_same(x: Any, y: Any) -> None:
    shapes = [jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in (x, y)]
    if shapes[0] != shapes[1]:
        raise TypeError(f"Parts.layer: takes {shapes[0]} and returns {shapes[1]}; a scanned layer returns what it takes")
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"Parts.embed: x has a leaf of {leaf.dtype}; pass what is not differentiated through the batch")

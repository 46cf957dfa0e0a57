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

from coat_jax.fused_step import dependence
from coat_jax.fused_step import weight_codes as once
from coat_jax.fused_step.layer_vjp import LayerVjp, Residuals
from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params, alone, hide, one_row, show, stacked
from coat_jax.fused_step.weight_codes import Codes


@dataclasses.dataclass(frozen=True)
class Tape:
    """A forward pass, ready to be walked backward any number of times.

    Attributes:
      loss: float32 scalar.
      layers: number of layers.
    """

    loss: jax.Array
    layers: int
    _outer: Params
    _layer: LayerVjp
    _codes: Codes | None
    _kept: Any
    _cotangent: Any
    _outer_pulls: tuple[Callable, Any]

    @classmethod
    def record(cls, parts: LayeredModel, params: Params, batch: Batch, trained: Any, codes: Codes | None = None) -> "Tape":
        """Runs the model forward.

        Args:
          trained: a tree of bools like params; where False, no gradient is computed.
          codes: of the layers' weights, from `weight_codes`; None quantizes weights where they are used.
        """
        rows, outer = parts.split(params)
        trained_rows, trained_outer = parts.split(trained)

        def differentiable(fn: Callable) -> Callable:
            return lambda shown, *rest: fn(show(trained_outer, shown, outer), *rest, batch)

        shown = hide(trained_outer, outer)
        x, pull_embed = _pull_used(differentiable(parts.embed), shown)
        layer = LayerVjp.of(parts, batch, trained_rows, one_row(rows), x)

        def forward(x: Any, inputs: tuple[Params, Codes | None]) -> tuple[Any, Residuals]:
            row, codes = inputs
            return layer.forward(row, x) if codes is None else once.using(layer.forward, codes, row, x)

        x, kept = jax.lax.scan(forward, x, (rows, codes))
        loss, pull_loss = _pull_used(differentiable(parts.loss), shown, x)
        if loss.shape != ():
            raise TypeError(f"LayeredModel.loss: returned shape {loss.shape}; a loss is a scalar, the mean over the batch")
        d_head, cotangent = pull_loss(jnp.ones_like(loss))
        return cls(loss, parts.layers(params), shown, layer, codes, kept, cotangent, (pull_embed, d_head))

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

        def body(state: tuple[Any, Any], inputs: tuple[jax.Array, Residuals, Codes | None]) -> tuple[tuple[Any, Any], Any]:
            cotangent, carry = state
            i, kept, codes = inputs
            row, backward = alone(row_of(carry, i)), self._layer.backward
            if codes is None:
                grads, cotangent = backward(row, kept, cotangent)
            else:
                grads, cotangent = once.using(backward, codes, row, kept, cotangent)
            carry, collected = visit(carry, i, stacked(grads))
            return (cotangent, carry), collected

        pull_embed, d_head = self._outer_pulls
        inputs = (jnp.arange(self.layers), self._kept, self._codes)
        (cotangent, carry), collected = jax.lax.scan(body, (self._cotangent, carry), inputs, reverse=True)
        return carry, collected, _add(pull_embed(cotangent)[0], d_head, self._outer)


def weight_codes(parts: LayeredModel, params: Params, batch: Batch, trained: Any) -> Codes:
    """The codes of all layers' weights, stacked: what forward and backward passes quantize them to. The batch gives shapes."""
    rows, outer = parts.split(params)
    x = jax.eval_shape(parts.embed, outer, batch)
    layer = LayerVjp.of(parts, batch, parts.split(trained)[0], one_row(rows), x)
    return jax.lax.map(lambda row: layer.codes(row, x), rows)


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

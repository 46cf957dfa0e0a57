"""A backward pass that hands out the gradients of one layer at a time, so that they never exist together.

The forward scan of a stack keeps, for each layer, what its backward pass needs and cannot have again from the layer's
parameters alone; the reverse scan makes the rest again. What is done with the gradients of a layer, and which trees are updated
in place meanwhile, is the caller's `visit`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.fused_step import dependence
from coat_jax.fused_step.layer_vjp import LayerVjp, Residuals
from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params, alone, hide, one_row, show, stacked


@dataclasses.dataclass(frozen=True)
class Segment:
    """One stack of a forward pass.

    Attributes:
      layer: forward and backward of one layer.
      layers: how many.
      codes: of the layers' weights, stacked, or None.
      kept: what each layer kept, stacked.
      pull: from the cotangent of the first layer's x to those of the outer parameters and of what stood before.
    """

    layer: LayerVjp
    layers: int
    codes: Any
    kept: Residuals
    pull: Callable


@dataclasses.dataclass(frozen=True)
class Tape:
    """A forward pass, ready to be walked backward any number of times.

    Attributes:
      loss: float32 scalar, times the share that it was recorded with.
      segments: the stacks by key, in the order in which they ran.
    """

    loss: jax.Array
    segments: dict[str, Segment]
    _outer: Params
    _d_head: Params
    _cotangent: Any

    @classmethod
    def record(
        cls,
        parts: LayeredModel,
        params: Params,
        batch: Batch,
        trained: Any,
        codes: Mapping[str, Any] | None = None,
        share: jax.Array | None = None,
    ) -> "Tape":
        """Runs the model forward.

        Args:
          parts, params, batch: the model and what it is run on.
          trained: a tree of bools like params; where False, no gradient is computed.
          codes: of the layers' weights, from `LayeredModel.weight_codes`; None quantizes weights where they are used.
          share: what the loss and so all gradients are multiplied by; None is 1.
        """
        rows, outer = parts.split(params)
        trained_rows, trained_outer = parts.split(trained)
        shown = hide(trained_outer, outer)

        def differentiable(fn: Callable) -> Callable:
            return lambda shown, *rest: fn(show(trained_outer, shown, outer), *rest, batch)

        x, segments = None, {}
        for stack in parts.stacks:
            own = None if codes is None else codes[stack.key]
            enter = differentiable(stack.enter)
            if x is None:  # what embed reads of the batch is not differentiated
                x, pull = _pull_used(lambda shown, enter=enter: enter(shown, None), shown)
            else:
                x, pull = _pull_used(enter, shown, x)
            layer = LayerVjp.of(stack, batch, trained_rows[stack.key], one_row(rows[stack.key]), one_row(own), x)

            def forward(x: Any, inputs: tuple[Params, Any], layer: LayerVjp = layer) -> tuple[Any, Residuals]:
                return layer.forward(*inputs, x)

            x, kept = jax.lax.scan(forward, x, (rows[stack.key], own))
            segments[stack.key] = Segment(layer, parts.layers(params)[stack.key], own, kept, pull)
        loss, pull_loss = _pull_used(differentiable(parts.loss), shown, x)
        if loss.shape != ():
            raise TypeError(f"LayeredModel.loss: returned shape {loss.shape}; a loss is a scalar, the mean over the batch")
        share = jnp.ones_like(loss) if share is None else share.astype(loss.dtype)
        d_head, cotangent = pull_loss(share)
        return cls(loss * share, segments, shown, d_head, cotangent)

    def walk(
        self, visit: Callable, carries: Mapping[str, Any], row_of: Callable[[str, Any, jax.Array], Params]
    ) -> tuple[dict[str, Any], dict[str, Any], Params]:
        """Walks back from the last layer of the last stack to the first of the first, then to the embedding.

        Args:
          visit: (key, carry, i, gradients of layer i as a stack of one) -> (carry, what to collect).
          carries: for each stack what its visits update in place.
          row_of: (key, carry, i) -> parameters of layer i as the forward pass had them, as a stack of one. Where the visits
            update the parameters, it reads them from the carry: a second tree of them outside would be a second copy in memory.

        Returns:
          By stack the last carry and what was collected with the layers as first axis; the gradients of the outer parameters.
        """
        cotangent, outer_grads = self._cotangent, [self._d_head]
        done, collected = {}, {}
        for key, segment in reversed(self.segments.items()):

            def body(state: Any, inputs: Any, key: str = key, segment: Segment = segment) -> tuple[Any, Any]:
                cotangent, carry = state
                i, kept, codes = inputs
                grads, cotangent = segment.layer.backward(alone(row_of(key, carry, i)), codes, kept, cotangent)
                carry, found = visit(key, carry, i, stacked(grads))
                return (cotangent, carry), found

            inputs = (jnp.arange(segment.layers), segment.kept, segment.codes)
            (cotangent, done[key]), collected[key] = jax.lax.scan(body, (cotangent, carries[key]), inputs, reverse=True)
            grads, *before = segment.pull(cotangent)
            outer_grads.append(grads)
            cotangent = before[0] if before else None
        forward = list(self.segments)
        return {key: done[key] for key in forward}, {key: collected[key] for key in forward}, _add(outer_grads, self._outer)


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


def _add(grads: Sequence[Params], like: Params) -> Params:
    """The sum of gradients, added from the loss backward as JAX adds them; zeros where there is none."""

    def add(x: jax.Array, *grads: jax.Array | None) -> jax.Array:
        there = [grad for grad in grads if grad is not None]
        return sum(there[1:], there[0]) if there else jnp.zeros_like(x)

    return jax.tree.map(add, like, *grads)

"""Gradients of several micro-batches, summed in a scan; the last one is left to the step that uses the sums."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params, hide, put, show, take
from coat_jax.fused_step.tape import Tape


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How a batch is cut and its gradients summed: the mean over micro-batches of each one's mean.

    Where the model has a `loss_weight`, micro-batches count in its proportions: two that hold 900 and 100 tokens which are no
    padding count 1.8 and 0.2, and the mean is over tokens, as it is without micro-batches.

    Micro-batch j takes rows j, j + n, j + 2n, ... of the batch: one that is sharded over devices is cut without moving rows.
    The sums are one tree like the parameters; what is summed last goes straight into the update.

    Attributes:
      micro_batches: n, how many.
      dtype: of the sums, float32 or bfloat16 (half the memory, each addition rounds by at most 2^-9 of the sum).

    Raises:
      ValueError, TypeError: n < 1, another dtype.
    """

    micro_batches: int = 1
    dtype: Any = jnp.float32

    def __post_init__(self):
        if self.micro_batches < 1:
            raise ValueError(f"Accumulation: micro_batches={self.micro_batches}; use 1 or more")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
            raise TypeError(f"Accumulation: dtype={self.dtype}; sums are float32 or bfloat16")

    def cut(self, batch: Batch) -> Batch:
        """The batch with a first axis of micro-batches.

        Raises:
          ValueError: a batch that does not divide.
        """
        n = self.micro_batches

        def cut(x: jax.Array) -> jax.Array:
            if not x.shape or x.shape[0] % n:
                raise ValueError(f"batch: shape {x.shape} does not divide into {n} micro-batches along its first axis")
            return jnp.swapaxes(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 0, 1)

        return jax.tree.map(cut, batch)

    def mean(self, sums: Params | None, grads: Params) -> Params:
        """The mean gradient: of the sums and the last micro-batch's gradients, in float32; these themselves where n is 1."""
        if sums is None:
            return grads
        share = 1 / self.micro_batches
        return jax.tree.map(lambda s, g: (s.astype(jnp.float32) + g.astype(jnp.float32)) * share, sums, grads)

    def mean_loss(self, losses: jax.Array | None, last: jax.Array) -> jax.Array:
        """The mean loss."""
        return last.astype(jnp.float32) if losses is None else (losses + last) / self.micro_batches

    def zeros(self, params: Params) -> Params:
        """Sums of nothing."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, self.dtype), params)

    def add(self, sums: Params, grads: Params) -> Params:
        """The sums and one more: added in float32, rounded once."""
        return jax.tree.map(lambda s, g: (s.astype(jnp.float32) + g.astype(jnp.float32)).astype(self.dtype), sums, grads)


class Sums(NamedTuple):
    """Sums over all micro-batches but the last; None where there is one.

    Attributes:
      grads: of gradients, a tree like the trained parameters.
      losses: of losses.
      last: the last micro-batch.
      codes: of the layers' weights, for the last micro-batch too; see `LayeredModel.weight_codes`.
      share: what the last micro-batch's loss counts, or None for 1.
    """

    grads: Params | None
    losses: jax.Array | None
    last: Batch
    codes: Any = None
    share: jax.Array | None = None


def fused_sums(parts: LayeredModel, params: Params, trained: Any, batch: Batch, how: Accumulation) -> Sums:
    """The sums, each layer's added inside the backward pass: beside them no other gradients exist."""
    rows = parts.split(params)[0]

    def add_row(key: str, sums: Params, i: jax.Array, grads: Params) -> tuple[Params, None]:
        return put(sums, how.add(take(sums, i), grads), i), None

    def add(sums: Params, micro: Batch, codes: Any, share: jax.Array | None) -> tuple[Params, jax.Array]:
        tape = Tape.record(parts, params, micro, trained, codes, share)
        row_sums, outer_sums = parts.split(sums)
        row_sums, _, outer = tape.walk(add_row, row_sums, lambda key, _, i: take(rows[key], i))
        return parts.join(row_sums, how.add(outer_sums, outer)), tape.loss

    return _sums(add, parts, params, trained, batch, how)


def ordinary_sums(parts: LayeredModel, params: Params, trained: Any, batch: Batch, how: Accumulation) -> Sums:
    """The sums, by ordinary automatic differentiation."""

    def add(sums: Params, micro: Batch, codes: Any, share: jax.Array | None) -> tuple[Params, jax.Array]:
        loss, grads = value_and_grad(parts, params, trained, micro, codes, share)
        return how.add(sums, grads), loss

    return _sums(add, parts, params, trained, batch, how)


def value_and_grad(
    parts: LayeredModel, params: Params, trained: Any, batch: Batch, codes: Any, share: jax.Array | None
) -> tuple[jax.Array, Params]:
    """The loss and the gradients of the trained parameters by `jax.value_and_grad`, both times `share`."""

    def loss(shown: Params) -> jax.Array:
        value = parts(show(trained, shown, params), batch, codes)
        return value if share is None else value * share.astype(value.dtype)

    return jax.value_and_grad(loss)(hide(trained, params))


def _sums(
    add: Callable[..., tuple[Params, jax.Array]],
    parts: LayeredModel,
    params: Params,
    trained: Any,
    batch: Batch,
    how: Accumulation,
) -> Sums:
    """A scan over all micro-batches but the last, which adds each one's gradients to the sums.

    Weights are quantized once, before the first micro-batch, and their codes serve all.
    """
    if how.micro_batches == 1:
        return Sums(None, None, batch)
    micro, shares = how.cut(batch), None
    if parts.loss_weight is not None:
        counts = jax.vmap(parts.loss_weight)(micro).astype(jnp.float32)
        shares = how.micro_batches * counts / jnp.maximum(counts.sum(), jnp.finfo(jnp.float32).tiny)
    codes = parts.weight_codes(params)

    def one(carry: tuple[Params, jax.Array], inputs: tuple[Batch, Any]) -> tuple[tuple[Params, jax.Array], None]:
        sums, losses = carry
        sums, loss = add(sums, inputs[0], codes, inputs[1])
        return (sums, losses + loss), None

    first, last = (jax.tree.map(lambda x, part=part: x[part], (micro, shares)) for part in (slice(-1), -1))
    (sums, losses), _ = jax.lax.scan(one, (how.zeros(hide(trained, params)), jnp.zeros((), jnp.float32)), first)
    return Sums(sums, losses, last[0], codes, last[1])

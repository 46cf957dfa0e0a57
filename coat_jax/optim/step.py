"""One step of one leaf: arrays as they are kept on one side, group math on the other."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coat_jax.optim import leaves, master, moments
from coat_jax.optim.codecs import FLOAT32, MomentCodec
from coat_jax.optim.master import Master, Weight
from coat_jax.optim.moments import Elements, Hyper, Moments, Rate
from coat_jax.quant import Groups, PerGroup, PerTensor, QuantizedArray, QuantSpec, rounding
from coat_jax.quant.formats import TINY
from coat_jax.quant.quantize import merge_codes, split_codes

FLOAT = np.dtype(np.float32)


class Leaf(NamedTuple):
    """Which leaf, or which row of a leaf that a scan over layers stacks, is updated.

    Attributes:
      name: its path in the parameter tree, such as "layers/mlp/kernel". The seed of its random bits.
      row: None for a whole leaf; else the row, along the first axis of the stacked leaf, that the arrays are. Its random bits
        are those that this row gets in an update of the whole.
    """

    name: str
    row: jax.Array | int | None = None

    @property
    def seed(self) -> int:
        """The seed of the leaf's random bits."""
        return leaves.leaf_seed(self.name)

    def offset(self, shape: tuple[int, ...]) -> jax.Array | int:
        """The number, in the whole leaf, of the first element of arrays of `shape`."""
        if self.row is None:
            return 0
        return jnp.asarray(self.row, jnp.uint32) * jnp.uint32(np.prod(shape, dtype=np.uint64) % 2**32)

    def elements(self, shape: tuple[int, ...], groups: Groups, needed: bool) -> Elements:
        """The random bits' numbering of arrays of `shape` seen as `groups`."""
        if not needed:
            return Elements(self.seed, None)
        return Elements(self.seed, groups.split(rounding.element_index(shape, self.offset(shape))))


def codec_of(codec: MomentCodec, mu: Any, nu: Any) -> MomentCodec:
    """The codec of a leaf by what it keeps: `codec` along the leaf's axis, or FLOAT32.

    Raises:
      ValueError: a state that was made with another codec.
    """
    specs = [moment.spec if isinstance(moment, QuantizedArray) else None for moment in (mu, nu)]
    kept = next((spec.granularity for spec in specs if spec is not None), None)
    if kept is None:
        return FLOAT32
    own = codec.along(kept.axis)  # type: ignore[attr-defined]
    for name, spec, wanted in zip(("mu", "nu"), specs, (own.mu, own.nu), strict=True):
        if spec != wanted:
            raise ValueError(
                f"coat_adamw: the state keeps {name} as {spec or 'float32'}, the codec as {wanted or 'float32'}; "
                "use the codec that the state was made with"
            )
    return own


def revive(stored: Any, spec: QuantSpec | None) -> Any:
    """A stored moment, made a `QuantizedArray` again where only a mapping of its parts is left.

    `flax.nnx.Optimizer` keeps its state as nested mappings, in which nodes of other libraries lose their class after a step.
    The axis of the groups is the one for which the scale's shape fits.
    """
    if not isinstance(stored, Mapping) or spec is None:
        return stored
    payload, scale = stored["payload"], stored["scale"]
    assert isinstance(spec.granularity, PerGroup)
    turned = (dataclasses.replace(spec.granularity, axis=-1 - i) for i in range(payload.ndim))
    fits = next(groups for groups in turned if Groups.of(groups, payload.shape).scale_shape == scale.shape)
    spec = dataclasses.replace(spec, granularity=fits)
    return QuantizedArray(payload, scale, stored.get("exponent"), spec, FLOAT)


def zeros(shape: tuple[int, ...], spec: QuantSpec | None) -> QuantizedArray | jax.Array:
    """A moment of zeros: float32, or as `spec` stores it."""
    if spec is None:
        return jnp.zeros(shape, FLOAT)
    scale_shape = Groups.of(spec.granularity, shape).scale_shape
    exponent = jnp.ones(scale_shape, jnp.uint8) if spec.has_exponent else None
    payload, scale = jnp.zeros(shape, spec.format.dtype), jnp.full(scale_shape, TINY, spec.scale_dtype)
    return QuantizedArray(payload, scale, exponent, spec, FLOAT)


def groups_of(codec: MomentCodec, shape: tuple[int, ...]) -> Groups:
    """The groups of a leaf's moments; one group for a leaf of float32 moments."""
    spec = codec.nu or codec.mu
    return Groups.of(spec.granularity if spec else PerTensor(), shape)


def split(stored: Any, groups: Groups) -> Any:
    """A moment of a leaf laid out by groups: `Codes` or float32."""
    if stored.shape != groups.shape:
        raise ValueError(
            f"coat_adamw: a gradient of shape {groups.shape} for moments of shape {stored.shape}; "
            "the state belongs to other parameters"
        )
    return split_codes(stored)[0] if isinstance(stored, QuantizedArray) else groups.split(stored)


def merge(stored: Any, groups: Groups, spec: QuantSpec | None) -> Any:
    """The inverse of `split`."""
    return groups.merge(stored) if spec is None else merge_codes(stored, groups, spec, FLOAT)


ROWS_APART = 2**24
"""Elements from which on a leaf that stacks layers is updated row by row, so that temporaries are those of one row."""


def is_stack(grad: jax.Array, leaf: Leaf) -> bool:
    """Whether a leaf is updated row by row of its first axis."""
    return leaf.row is None and grad.ndim > 2 and grad.size >= ROWS_APART


def in_rows(step: Callable[[jax.Array, Any, Leaf], Any], grad: jax.Array, kept: Any, leaf: Leaf) -> Any:
    """step(grad, kept, leaf) taken for one row of the first axis after another, with the bits of the whole.

    `kept`, what the step returns anew, is written in place.
    """

    def row(i: jax.Array, kept: Any) -> Any:
        here, kept_here = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), (grad, kept))
        new = step(here, kept_here, Leaf(leaf.name, i))
        return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, i, 0), kept, new)

    return jax.lax.fori_loop(0, grad.shape[0], row, kept)


def in_turn(leaf: Any, last: Any) -> tuple[Any, Any]:
    """What a leaf is updated from, and what the last one keeps, the first available only after the second.

    Leaves do not depend on each other, and a compiler that begins all of them before it ends one holds float32 copies of all.
    """
    return jax.lax.optimization_barrier((leaf, last))


class Adam(NamedTuple):
    """Adam's numbers as they were given: Python floats, or arrays where a schedule drives them."""

    b1: jax.typing.ArrayLike
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike


class LeafUpdate(NamedTuple):
    """One step of an optimizer, ready to take any of its leaves.

    Attributes:
      codec: of the optimizer; a leaf uses it, along its own axis, where its moments are quantized.
      master: how bfloat16 parameters are kept.
      hyper: the scalars of the step.
    """

    codec: MomentCodec
    master: Master | None
    hyper: Hyper

    @classmethod
    def at(cls, count: jax.Array, adam: Adam, codec: MomentCodec, master: Master | None = None) -> "LeafUpdate":
        """The step after `count` steps."""
        return cls(codec, master, Hyper.of(optax.safe_increment(count), *adam))

    def direction(self, grad: jax.Array, mu: Any, nu: Any, leaf: Leaf) -> tuple[jax.Array, Any, Any]:
        """The update direction of a leaf (float32), and its mu and nu to keep."""
        mu, nu = revive(mu, self.codec.mu), revive(nu, self.codec.nu)
        if is_stack(grad, leaf):
            start = (jnp.zeros(grad.shape, FLOAT), mu, nu)
            return in_rows(lambda grad, kept, leaf: self.direction(grad, kept[1], kept[2], leaf), grad, start, leaf)
        groups, _, direction, mu, nu = self._moments(grad, mu, nu, leaf)
        return groups.merge(direction), mu, nu

    def update(self, grad: jax.Array, mu: Any, nu: Any, weight: Weight, rate: Rate, leaf: Leaf) -> tuple[Weight, Any, Any]:
        """The next weight of a leaf, and its mu and nu to keep, in one pass."""
        mu, nu = revive(mu, self.codec.mu), revive(nu, self.codec.nu)
        if is_stack(grad, leaf):
            return in_rows(
                lambda grad, kept, leaf: self.update(grad, kept[1], kept[2], kept[0], rate, leaf), grad, (weight, mu, nu), leaf
            )
        groups, elements, direction, mu, nu = self._moments(grad, mu, nu, leaf)
        old = jax.tree.map(groups.split, weight)
        new = moments.update_weight(old, direction, self.master, rate, self.hyper, elements)
        return jax.tree.map(groups.merge, new), mu, nu

    def _moments(self, grad: jax.Array, mu: Any, nu: Any, leaf: Leaf) -> tuple[Groups, Elements, jax.Array, Any, Any]:
        """The groups of a leaf, their elements and their direction, and the leaf's mu and nu to keep."""
        codec = codec_of(self.codec, mu, nu)
        groups = groups_of(codec, grad.shape)
        elements = leaf.elements(grad.shape, groups, codec.stochastic or master.needs_noise(self.master))
        stored = Moments(split(mu, groups), split(nu, groups))
        direction, kept = moments.step(groups.split(grad.astype(jnp.float32)), stored, codec, groups.axes, self.hyper, elements)
        return groups, elements, direction, merge(kept.mu, groups, codec.mu), merge(kept.nu, groups, codec.nu)

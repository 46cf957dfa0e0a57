"""One step of leaves in plain JAX: arrays as they are kept on one side, group math on the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.optim import adam_formula
from coat_jax.optim.adam_formula import Hyper, Moments, Noise, Rate
from coat_jax.optim.codecs import FLOAT32, MomentCodec
from coat_jax.optim.master import Master, Weight
from coat_jax.optim.sharding import sharding_of_groups
from coat_jax.quant import Groups, PerGroup, PerTensor, QuantizedArray, QuantSpec, rounding
from coat_jax.quant.formats import TINY
from coat_jax.quant.quantize import merge_codes, split_codes

FLOAT = np.dtype(np.float32)


class Leaf(NamedTuple):
    """What one leaf of the parameters brings to a step.

    Attributes:
      grad: its gradient.
      mu, nu: its moments as they are kept.
      weight: its weight as it is kept; None where only a direction is asked for.
      rate: how far the weight follows the direction; None likewise.
      row: None for a whole leaf; else the number of the row, along the first axis of a leaf that a scan over layers stacks,
        that these arrays are. Its random bits are those that the row gets in a step of the whole.
    """

    grad: jax.Array
    mu: Any
    nu: Any
    weight: Weight | None = None
    rate: Rate | None = None
    row: jax.Array | int | None = None


def first_number(shape: tuple[int, ...], row: jax.Array | int | None) -> jax.Array | int:
    """The number, in the whole leaf, of the first element of arrays of `shape` that are its row `row`.

    A leaf (32, 4, 6) numbers its elements 0 to 767. Row 2, given as arrays (1, 4, 6), has 24 elements and begins at
    2 * 24 = 48. Its random bits are a hash of (seed of the leaf, step, 48 + i), which an update of the whole computes too: so
    a row updated inside the backward pass gets the same bytes.
    """
    if row is None:
        return 0
    return jnp.asarray(row, jnp.uint32) * jnp.uint32(np.prod(shape, dtype=np.uint64) % 2**32)


def noise_of_leaf(
    seed: jax.typing.ArrayLike, codec: MomentCodec, groups: Groups, row: jax.Array | int | None, count: jax.Array
) -> Noise:
    """The random bits of the leaf of that seed, or of its row `row`, laid out by `groups`."""

    @functools.cache
    def numbers() -> jax.Array:
        return groups.split(rounding.element_index(groups.shape, first_number(groups.shape, row)))

    return adam_formula.noise_of(seed, numbers, count, codec.antithetic)


def codec_of(codec: MomentCodec, mu: Any, nu: Any, operation: str = "coat_adamw") -> MomentCodec:
    """The codec of a leaf by what it keeps: `codec` with the leaf's groups, or FLOAT32.

    Raises:
      ValueError: a state that was made with another codec.
    """
    specs = [moment.spec if isinstance(moment, QuantizedArray) else None for moment in (mu, nu)]
    kept = next((spec.granularity for spec in specs if spec is not None), None)
    if kept is None:
        return FLOAT32
    assert isinstance(kept, PerGroup)
    own = codec.along(kept)
    for name, spec, wanted in zip(("mu", "nu"), specs, (own.mu, own.nu), strict=True):
        if spec != wanted:
            raise ValueError(
                f"{operation}: the state keeps {name} as {spec or 'float32'}, the codec as {wanted or 'float32'}; "
                "use the codec that the state was made with"
            )
    return own


def zeros(like: Any, spec: QuantSpec | None) -> QuantizedArray | jax.Array:
    """A moment of zeros for the parameter `like`: float32, or as `spec` stores it. It lies where the parameter lies."""
    if spec is None:
        return jnp.zeros_like(like, FLOAT)
    scale_shape = Groups.of(spec.granularity, like.shape).scale_shape
    place = sharding_of_groups(like, scale_shape)
    exponent = jnp.ones(scale_shape, jnp.uint8, device=place) if spec.has_exponent else None
    scale = jnp.full(scale_shape, TINY, spec.scale_dtype, device=place)
    return QuantizedArray(jnp.zeros_like(like, spec.format.dtype), scale, exponent, spec, FLOAT)


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


def is_stack(leaf: Leaf) -> bool:
    """Whether a leaf is updated row by row of its first axis."""
    return leaf.row is None and leaf.grad.ndim > 2 and leaf.grad.size >= ROWS_APART


def in_rows(step: Callable[[Leaf], Any], leaf: Leaf) -> Any:
    """step(leaf) taken for one row of the first axis after another, with the bits of the whole.

    What the step returns, (weight or direction, mu, nu), is written in place of what was.
    """
    first = jnp.zeros(leaf.grad.shape, FLOAT) if leaf.weight is None else leaf.weight

    def row(i: jax.Array, kept: Any) -> Any:
        grad, (weight, mu, nu) = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), (leaf.grad, kept))
        new = step(Leaf(grad, mu, nu, None if leaf.weight is None else weight, leaf.rate, i))
        return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, i, 0), kept, new)

    return jax.lax.fori_loop(0, leaf.grad.shape[0], row, (first, leaf.mu, leaf.nu))


def in_turn(leaves: list[Leaf], last: list[Any]) -> tuple[list[Leaf], list[Any]]:
    """Leaves that can begin only when the last result is there.

    Leaves do not depend on each other, and a compiler that begins all of them before it ends one holds float32 copies of all.
    """
    if not last:
        return leaves, last
    inputs, last = jax.lax.optimization_barrier(([leaf[:3] for leaf in leaves], last))
    return [leaf._replace(grad=g, mu=mu, nu=nu) for (g, mu, nu), leaf in zip(inputs, leaves, strict=True)], last


@jax.custom_jvp
def first_order(x: jax.Array) -> jax.Array:
    """x itself, where nobody differentiates.

    Rounding to one byte, and the bit operations that make a step give the same bits in every program, have derivatives of 0,
    which would be wrong in silence.

    Raises:
      TypeError: a program that differentiates through it.
    """
    return x


@first_order.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "coat_adamw: a derivative through its step is asked for, and rounding to one byte has none; "
        "put jax.lax.stop_gradient around what it gets, or use optax.adamw"
    )


@functools.partial(jax.jit, static_argnames=("codec", "keep"))
def step_leaf(
    leaf: Leaf, seed: jax.typing.ArrayLike, codec: MomentCodec, keep: Master | None, hyper: Hyper
) -> tuple[Any, Any, Any]:
    """One step of a leaf: its next weight, or its direction (float32) where it has none, and mu and nu to keep.

    Traced once for all leaves that look alike, whatever their names.

    Args:
      seed: of the leaf's random bits, by its name.
      codec: of the optimizer; a leaf uses it, with its own groups, where its moments are quantized.
      keep: how bfloat16 parameters are kept.
      hyper: the scalars of the step.
    """
    if is_stack(leaf):
        return in_rows(lambda row: step_leaf(row, seed, codec, keep, hyper), leaf)
    codec = codec_of(codec, leaf.mu, leaf.nu)
    groups = groups_of(codec, leaf.grad.shape)
    noise = noise_of_leaf(seed, codec, groups, leaf.row, hyper.count)

    def follow(direction: jax.Array) -> Any:
        if leaf.weight is None or leaf.rate is None:
            return direction
        return adam_formula.next_weight(jax.tree.map(groups.split, leaf.weight), direction, keep, leaf.rate, hyper, noise)

    stored = Moments(split(leaf.mu, groups), split(leaf.nu, groups))
    followed, kept = adam_formula.step(groups.split(leaf.grad), stored, codec, groups.axes, hyper, noise, follow)
    return jax.tree.map(groups.merge, followed), merge(kept.mu, groups, codec.mu), merge(kept.nu, groups, codec.nu)


def step_leaves(
    leaves: Sequence[Leaf], seeds: jax.Array, codec: MomentCodec, keep: Master | None, hyper: Hyper
) -> list[tuple[Any, Any, Any]]:
    """`step_leaf` of one leaf after another."""
    done: list[Any] = []
    for i, leaf in enumerate(leaves):
        [leaf], done[-1:] = in_turn([leaf], done[-1:])
        done.append(step_leaf(leaf, seeds[i], codec, keep, hyper))
    return done

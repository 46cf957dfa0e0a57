"""Rounding modes, and the random bits of the stochastic one: a counter-based hash that no sharding can change."""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp


class Rounding(enum.StrEnum):
    """How a value between two codes chooses one."""

    NEAREST = "nearest"
    """The nearer code, ties to even."""
    STOCHASTIC = "stochastic"
    """Either neighbour, with probabilities such that the expected decoded value is the value itself."""


def floor(x: jax.Array) -> jax.Array:
    """The largest whole number <= x. (Kernels have `round` and no `floor`.)"""
    near = jnp.round(x)
    return jnp.where(near > x, near - 1.0, near)


def finite(x: jax.Array) -> jax.Array:
    """Whether x is neither inf nor NaN. (Kernels have no `isfinite`.)"""
    return jnp.abs(x) < jnp.inf


def to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 x at bfloat16's precision, to nearest even, by its bits: no compiler removes it, and kernels have it."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return jnp.where(x == x, jax.lax.bitcast_convert_type(near, jnp.float32), x)


def mix(x: jax.Array) -> jax.Array:
    """A bijective hash of uint32 values in which every input bit moves half of the output bits (a 32-bit finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def fold(seed: jax.Array | int, data: jax.Array | int) -> jax.Array:
    """A new uint32 seed from a seed and a number, such as a step or the index of a leaf."""
    return mix(jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x9E3779B9) + mix(jnp.asarray(data, jnp.uint32)))


def element_index(shape: Sequence[int], offset: jax.Array | int = 0) -> jax.Array:
    """Row-major number of every element, uint32 modulo 2^32, counted from `offset`.

    Row i of a stacked array gives its elements the numbers they have in the whole: offset = i * row.size.
    """
    index = jnp.full(tuple(shape), jnp.asarray(offset, jnp.uint32))
    stride = 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, tuple(shape), axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def _unit(bits: jax.Array) -> jax.Array:
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def uniform(seed: jax.Array | int, index: jax.Array) -> jax.Array:
    """float32 in [0, 1), a pure function of (seed, index): 24 random bits each."""
    return _unit(mix(index ^ mix(jnp.asarray(seed, jnp.uint32))))


def paired(seed: jax.Array | int, step: jax.Array, index: jax.Array) -> jax.Array:
    """float32 in [0, 1), a pure function of (seed, step, index): u in an even step, 1 - u in the next one."""
    step = step.astype(jnp.uint32)
    bits = mix(index ^ mix(fold(seed, step >> 1)))
    return _unit(bits ^ (jnp.uint32(0) - (step & 1)))  # every bit turned in an odd step

"""The group math, written once: encode and decode groups of numbers. Plain jnp, traced by the kernels as well.

All functions see groups laid out along `axes` of a float32 array; statistics have those axes removed.

    plain scaling   payload = cast(x / scale)              scale = amax / max    x = payload * scale
    expansion f     payload = cast(sign(x) f(|x| / amax))  scale = amax          x = sign(payload) f^-1(|payload|) * scale

A group of zeros has the smallest normal scale and the payload 0. A NaN or an inf makes its whole group NaN. A scale lies in
[2^-126, 2^126], so that its reciprocal is a normal number too: with an expansion, magnitudes over 2^126 saturate there.

Quotients by a scale or a constant are written as products with its float32 reciprocal. XLA rewrites them so under jit, a
kernel or a single eager operation does not, and the codes would differ. No minimum or maximum is asked to carry a NaN: XLA's
on CPUs do not (its fast min-max), so NaN is put in with `where` behind them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant.expansion import floor_ratio
from coat_jax.quant.formats import TINY
from coat_jax.quant.rounding import Rounding, to_bfloat16
from coat_jax.quant.spec import QuantSpec

Axes = tuple[int, ...]


class DecayOnly(NamedTuple):
    """Elements that only decay.

    Attributes:
      mask: which they are.
      reach, power: an idle element widens the range of its group down to the ratio reach * r^power to amax and no further,
        where r is the ratio to amax of the smallest element that is live.
    """

    mask: jax.Array
    reach: float
    power: int


class Codes(NamedTuple):
    """What is stored for some groups: payload (one byte), scale and exponent (uint8, or None) per group."""

    payload: jax.Array
    scale: jax.Array
    exponent: jax.Array | None


def statistic_shape(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """Shape of a per-group statistic of an array whose groups lie along `axes`."""
    return tuple(n for i, n in enumerate(shape) if i - len(shape) not in axes)


def spread(statistic: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
    """A per-group statistic repeated over its group: the inverse shape of a reduction over `axes`."""
    kept = tuple(i for i in range(len(shape)) if i - len(shape) not in axes)
    return jax.lax.broadcast_in_dim(statistic, shape, kept)


def group_amax(x: jax.Array, axes: Axes) -> jax.Array:
    """max |x| of every group, at least the smallest normal float32; inf where the group has a NaN or an inf."""
    a = jnp.abs(x)
    # The exponent bits of a NaN or an inf are those of inf. A constant would be hoisted out of a scan; see `encode`.
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(a, jnp.int32) & 0x7F800000, jnp.float32)
    return jnp.max(jnp.where(a < jnp.inf, a, power), axis=axes, initial=TINY)


def group_amin(x: jax.Array, axes: Axes) -> jax.Array:
    """min |x| over the non-zero elements of every group; inf where all are zero."""
    a = jnp.abs(x)
    return jnp.min(jnp.where(a >= TINY, a, jnp.inf), axis=axes, initial=jnp.inf)


def smallest_ratio(x: jax.Array, amax: jax.Array, axes: Axes, idle: DecayOnly | None) -> jax.Array:
    """The ratio to amax that a group's exponent is fitted to: of its smallest non-zero element.

    DecayOnly elements count down to their reach, so that they fade without costing live ones much. Where no element is live all
    count: one step without a gradient must not squeeze a group into the range of its amax.
    """
    smallest = floor_ratio(group_amin(x, axes), amax)
    if idle is None:
        return smallest
    live = group_amin(jnp.where(idle.mask, 0.0, x), axes)
    ratio = floor_ratio(live, amax)
    reach = idle.reach * ratio**idle.power if idle.power else idle.reach  # kernels have no power of 0
    bounded = jnp.minimum(ratio, jnp.maximum(smallest, reach))
    return jnp.where(live < jnp.inf, bounded, smallest)


def store_scale(scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """scale as its stored dtype will read back, in float32 (an explicit rounding that no compiler removes)."""
    if dtype == np.float32:
        return scale
    return to_bfloat16(scale)


def scale_of(amax: jax.Array, spec: QuantSpec) -> jax.Array:
    """The scale that decodes a group whose largest magnitude is amax: amax, or amax / max for plain scaling; NaN for inf."""
    scale = amax if spec.expansion is not None else amax * (1 / spec.format.max)
    stored = store_scale(jnp.clip(scale, TINY, 1 / TINY), spec.scale_dtype)
    return jnp.where(amax < jnp.inf, stored, jnp.nan)


def round_to_codes(
    y: jax.Array,
    ratio: jax.Array,
    exponent: jax.Array | None,
    spec: QuantSpec,
    noise: jax.Array | None = None,
    idle: DecayOnly | None = None,
) -> jax.Array:
    """Magnitudes y in the code domain, which stand for `ratio`, each moved to one that the format represents.

    Stochastic rounding takes the upper neighbour with probability (ratio - low) / (high - low), all of them decoded values:
    in the linear domain, so that the expectation of what is decoded is what was encoded.
    """
    if spec.rounding is Rounding.NEAREST:
        return y if idle is None else jnp.where(idle.mask, spec.format.neighbours(jnp.minimum(y, spec.format.max))[0], y)
    assert noise is not None
    lower, upper = spec.format.neighbours(jnp.minimum(y, spec.format.max))
    if spec.expansion is None:
        low, high = lower, upper
    else:
        low, high = (
            jnp.where(z > 0, spec.expansion.contract(jnp.maximum(z, TINY), exponent, spec.format), 0.0) for z in (lower, upper)
        )
    return jnp.where(noise * (high - low) < ratio - low, upper, lower)


def encode(
    x: jax.Array,
    spec: QuantSpec,
    axes: Axes,
    noise: jax.Array | None = None,
    idle: DecayOnly | None = None,
    amax: jax.Array | None = None,
) -> Codes:
    """Codes of the groups that lie along `axes` of x.

    Args:
      x: float32.
      spec: static description; its granularity is not used, the groups are given by `axes`.
      axes: negative axes of x.
      noise: float32 in [0, 1) of x's shape, for stochastic rounding.
      idle: elements that only decay. They widen the range that the exponent is fitted to only so far (`smallest_ratio`), and
        nearest rounding takes them towards zero: a decay of less than half a code would leave them where they are for ever.
      amax: the largest magnitude that x is scaled by, as `group_amax` gives it, where that is not the group's own.
    """
    amax = group_amax(x, axes) if amax is None else jnp.broadcast_to(amax, statistic_shape(x.shape, axes))
    scale = scale_of(amax, spec)
    exponent = spread_exponent = None
    magnitude = jnp.abs(x)
    nonzero = magnitude >= TINY
    ratio = magnitude * spread(1.0 / scale, x.shape, axes)
    if spec.expansion is None:
        y = ratio
    else:
        if spec.has_exponent:
            exponent = spec.expansion.fit(smallest_ratio(x, amax, axes, idle))
            spread_exponent = spread(exponent, x.shape, axes)
        y = spec.expansion.expand(jnp.clip(ratio, TINY, 1.0), spread_exponent, spec.format)
    if spec.keep_nonzero:
        y = jnp.maximum(y, spec.format.tiny)
    y = round_to_codes(y, ratio, spread_exponent, spec, noise, idle)
    # 0 y and not the constant 0, which JAX's scan would compute before its loop and keep: a float32 array of x's size.
    y = jnp.where(jnp.isnan(ratio), ratio, jnp.where(nonzero, y, 0.0 * y))
    payload = spec.format.cast(jnp.where(x < 0, -y, y))
    stored = None if exponent is None else exponent.astype(jnp.int32).astype(jnp.uint8)
    return Codes(payload, scale.astype(spec.scale_dtype), stored)


def decode(codes: Codes, spec: QuantSpec, axes: Axes) -> jax.Array:
    """float32 values of the groups that lie along `axes` of the payload. Code 0 decodes to exactly 0."""
    payload = codes.payload.astype(jnp.float32)
    scale = spread(codes.scale.astype(jnp.float32), payload.shape, axes)
    if spec.expansion is None:
        return payload * scale
    exponent = None
    if codes.exponent is not None:
        exponent = spread(codes.exponent.astype(jnp.int32).astype(jnp.float32), payload.shape, axes)
    magnitude = jnp.abs(payload)
    ratio = spec.expansion.contract(jnp.maximum(magnitude, spec.format.tiny), exponent, spec.format)
    value = jnp.where(magnitude > 0, jnp.maximum(ratio * scale, TINY), 0.0)
    value = jnp.where(payload < 0, -value, value)
    return jnp.where(jnp.isnan(payload + scale), jnp.nan, value)

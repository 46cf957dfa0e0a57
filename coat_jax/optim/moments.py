"""The group math of one Adam step with stored moments, as pure functions of groups. Traced by the kernels as well.

    mu <- b1 mu + (1 - b1) g        nu <- b2 nu + (1 - b2) g^2
    direction = (mu / c1) / (sqrt(nu / c2 + eps_root) + eps)        c1 = 1 - b1^t    c2 = 1 - b2^t

The step uses the fresh moments; what storing them loses enters with the next step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.optim.codecs import MomentCodec
from coat_jax.quant import QuantSpec, Rounding, rounding
from coat_jax.quant.codec import Axes
from coat_jax.quant.codec import decode as decode_groups
from coat_jax.quant.codec import encode as encode_groups

Stored = Any
"""A moment as it is kept: `Codes`, or a float32 array where the codec's spec is None."""


class Hyper(NamedTuple):
    """The scalars of one step: float32, the same for every leaf. Betas and bias corrections are never in less.

    Attributes:
      count: int32, the step, from 1.
      correction_mu, correction_nu: 1 - b1^count and 1 - b2^count.
    """

    count: jax.Array  # type: ignore[assignment]
    b1: jax.Array
    b2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    correction_mu: jax.Array
    correction_nu: jax.Array

    @classmethod
    def of(cls, count, b1, b2, eps, eps_root) -> "Hyper":
        """The scalars of step `count` (already incremented)."""
        b1, b2, eps, eps_root = (jnp.asarray(value, jnp.float32) for value in (b1, b2, eps, eps_root))
        t = count.astype(jnp.float32)
        return cls(count, b1, b2, eps, eps_root, 1 - b1**t, 1 - b2**t)


class Moments(NamedTuple):
    """Both moments of some groups, as values or as they are stored."""

    mu: Stored
    nu: Stored


def _load(stored: Stored, spec: QuantSpec | None, axes: Axes) -> jax.Array:
    return stored if spec is None else decode_groups(stored, spec, axes)


def decode(stored: Moments, codec: MomentCodec, axes: Axes) -> Moments:
    """Both moments in float32. mu is 0 where nu is: a momentum without a second moment would be divided by eps."""
    nu = _load(stored.nu, codec.nu, axes)
    mu = _load(stored.mu, codec.mu, axes)
    if codec.relative:
        mu = mu * jnp.sqrt(nu)
    return Moments(jnp.where(nu > 0, mu, 0.0), nu)


def encode(
    moments: Moments, codec: MomentCodec, axes: Axes, hyper: Hyper, seed: int, index: jax.Array | None, grad: jax.Array
) -> Moments:
    """Both moments as the codec stores them.

    Args:
      seed: of the leaf; with the step and the element it fixes every random bit.
      index: uint32 number of each element in its leaf, needed where `codec.stochastic`.
    """

    def store(x: jax.Array, spec: QuantSpec | None, which: int, idle: jax.Array) -> Stored:
        if spec is None:
            return x
        noise = None
        if spec.rounding is Rounding.STOCHASTIC:
            assert index is not None
            noise = rounding.dither(rounding.fold(seed, which), hyper.count, index)
        return encode_groups(x, spec, axes, noise, idle)

    nu = store(moments.nu, codec.nu, 1, moments.mu == 0)
    mu = moments.mu
    if codec.relative:
        read = _load(nu, codec.nu, axes)
        mu = jnp.where(read > 0, mu * jax.lax.rsqrt(jnp.where(read > 0, read, 1.0)), 0.0)
    return Moments(store(mu, codec.mu, 0, grad == 0), nu)


def adam(grad: jax.Array, old: Moments, hyper: Hyper) -> tuple[jax.Array, Moments]:
    """The update direction and the next moments, in float32.

    A gradient that is not finite, or whose square is not, shows in the direction; that element keeps its moments.
    """
    mu = hyper.b1 * old.mu + (1 - hyper.b1) * grad
    nu = hyper.b2 * old.nu + (1 - hyper.b2) * grad * grad
    direction = (mu / hyper.correction_mu) / (jnp.sqrt(nu / hyper.correction_nu + hyper.eps_root) + hyper.eps)
    finite = jnp.isfinite(nu)
    return direction, Moments(jnp.where(finite, mu, old.mu), jnp.where(finite, nu, old.nu))


def step(
    grad: jax.Array, stored: Moments, codec: MomentCodec, axes: Axes, hyper: Hyper, seed: int, index: jax.Array | None
) -> tuple[jax.Array, Moments]:
    """One step of some groups: decode, Adam, encode. Returns the direction (float32) and the moments to keep."""
    direction, moments = adam(grad, decode(stored, codec, axes), hyper)
    return direction, encode(moments, codec, axes, hyper, seed, index, grad)

"""The group math of one Adam step with stored moments, as pure functions of groups. Traced by the kernels as well.

    mu <- b1 mu + (1 - b1) g        nu <- b2 nu + (1 - b2) g^2
    direction = (mu / c1) / (sqrt(nu / c2 + eps_root) + eps)        c1 = 1 - b1^t    c2 = 1 - b2^t
    weight <- weight - learning_rate (direction + weight_decay weight)

The step uses the fresh moments; what storing them loses enters with the next step.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.optim import master
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.master import Master, Weight
from coat_jax.quant import QuantSpec, Rounding, rounding
from coat_jax.quant.codec import Axes, DecayOnly
from coat_jax.quant.codec import decode as decode_groups
from coat_jax.quant.codec import encode as encode_groups

MU_REACH = (2.0**-16, 0)
"""How far a momentum that only decays may widen the range of its group (`DecayOnly`): down to 2^-16 of amax.

Seven steps without a gradient halve a momentum (0.9^7 = 0.48), so 105 steps take it from amax to 2^-16 of it. A range of 16
octaves over E4M3's 17 gives COAT's exponent k of about 1, plain scaling: an element that fades costs live ones no more.
"""

NU_REACH = (2.0**-1.5, 2)
"""How far the nu of an element without momentum may widen the range of its group: down to 2^-1.5 r^2 of amax, where r is the
ratio of the smallest live nu to amax.

Live nu from 1 down to 2^-6 make a range of 6 octaves; a dormant nu of 2^-30 would make it 30 and cost live elements most of
their codes. It may make it 2 * 6 + 1.5 = 13.5 octaves; what lies below is rounded up to 2^-13.5, so that such an element moves
less for some steps when its gradient returns. Emulated with half of a group dormant, the error of live elements stays under
twice that without.
"""

Stored = Any
"""A moment as it is kept: `Codes`, or a float32 array where the codec's spec is None."""


class Hyper(NamedTuple):
    """The scalars of one step: float32, the same for every leaf. Betas and bias corrections are never in less.

    Attributes:
      count: int32, the step, from 1.
      correction_mu, correction_nu: 1 / (1 - b1^count) and 1 / (1 - b2^count), factors: whether XLA turns a quotient into a
        product depends on how many leaves it sees.
    """

    count: jax.Array  # type: ignore[assignment]
    b1: jax.Array
    b2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    correction_mu: jax.Array
    correction_nu: jax.Array

    @classmethod
    def of(cls, count, b1, b2, eps, eps_root, right=1.0) -> "Hyper":
        """The scalars of step `count` (already incremented). `right` is a factor of every direction: 1, or NaN to stop."""
        b1, b2, eps, eps_root = (jnp.asarray(value, jnp.float32) for value in (b1, b2, eps, eps_root))
        t = count.astype(jnp.float32)
        return cls(count, b1, b2, eps, eps_root, right / (1 - b1**t), 1 / (1 - b2**t))

    def rounded(self, product: jax.Array) -> jax.Array:
        """The same number, float32, behind a bit operation that no compiler sees through.

        A compiler may round a product and the sum after it once (a fused multiply-add) in one program and twice in another;
        behind this it rounds twice in all, so that a step gives the same bits wherever it is compiled.
        """
        zero = self.count >> 31  # the sign of the count
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(product, jnp.int32) ^ zero, jnp.float32)


class Rate(NamedTuple):
    """How far a weight follows its direction: float32 scalars; weight_decay is 0 for a leaf that does not decay."""

    learning_rate: jax.Array
    weight_decay: jax.Array


class Moments(NamedTuple):
    """Both moments of some groups, as values or as they are stored."""

    mu: Stored
    nu: Stored


class NoiseUse(enum.IntEnum):
    """What random bits are for: each use has its own."""

    MU = 0
    NU = 1
    MASTER = 2


Noise = Callable[[NoiseUse], jax.Array]
"""Random bits of some groups: from what they are for to a float32 in [0, 1) for every element."""


def noise_of(seed: Any, numbers: Callable[[], jax.Array], count: jax.Array, antithetic: bool) -> Noise:
    """The random bits of one leaf in one step, a pure function of (seed, number, step, use).

    Args:
      seed: uint32, of the leaf.
      numbers: makes the uint32 number of each element in its leaf. A function, as a kernel has no registers to keep them.
      count: int32, the step.
      antithetic: whether the moments' bits of an odd step are those of the step before, turned (`MomentCodec`).
    """

    def noise(use: NoiseUse) -> jax.Array:
        own = rounding.fold(seed, use)
        if antithetic and use is not NoiseUse.MASTER:
            return rounding.paired(own, count, numbers())
        return rounding.uniform(rounding.fold(own, count), numbers())

    return noise


def _load(stored: Stored, spec: QuantSpec | None, axes: Axes) -> jax.Array:
    return stored if spec is None else decode_groups(stored, spec, axes)


def decode(stored: Moments, codec: MomentCodec, axes: Axes) -> Moments:
    """Both moments in float32. mu is 0 where nu is: a momentum without a second moment would be divided by eps."""
    nu = _load(stored.nu, codec.nu, axes)
    mu = _load(stored.mu, codec.mu, axes)
    if codec.relative:
        mu = mu * jnp.sqrt(nu)
    return Moments(jnp.where(nu > 0, mu, 0.0), nu)


def encode(moments: Moments, codec: MomentCodec, axes: Axes, still: jax.Array, noise: Noise) -> Moments:
    """Both moments as the codec stores them.

    Args:
      moments: float32, finite.
      codec: how they are stored.
      axes: along which groups lie.
      still: which elements had a gradient of exactly 0. Their mu only decays. It is rounded towards zero, which it reaches in
        some tens of steps; from then on their nu widens the range of its group no further than `NU_REACH`.
      noise: for stochastic rounding.
    """

    def store(x: jax.Array, spec: QuantSpec | None, use: NoiseUse, idle: DecayOnly) -> Stored:
        if spec is None:
            return x
        return encode_groups(x, spec, axes, noise(use) if spec.rounding is Rounding.STOCHASTIC else None, idle)

    nu = store(moments.nu, codec.nu, NoiseUse.NU, DecayOnly(moments.mu == 0, *NU_REACH))
    mu = moments.mu
    if codec.relative:
        read = _load(nu, codec.nu, axes)
        mu = jnp.where(read > 0, mu * jax.lax.rsqrt(jnp.where(read > 0, read, 1.0)), 0.0)
    return Moments(store(mu, codec.mu, NoiseUse.MU, DecayOnly(still, *MU_REACH)), nu)


def adam(grad: jax.Array, old: Moments, hyper: Hyper) -> tuple[jax.Array, Moments]:
    """The update direction and the next moments, in float32.

    A gradient that is not finite, or whose square is not, shows in the direction; that element keeps its moments.
    """
    mu = hyper.rounded(hyper.b1 * old.mu) + hyper.rounded((1 - hyper.b1) * grad)
    nu = hyper.rounded(hyper.b2 * old.nu) + hyper.rounded((1 - hyper.b2) * grad * grad)
    direction = (mu * hyper.correction_mu) / (jnp.sqrt(nu * hyper.correction_nu + hyper.eps_root) + hyper.eps)
    finite = rounding.finite(nu)
    return direction, Moments(jnp.where(finite, mu, old.mu), jnp.where(finite, nu, old.nu))


def step(
    grad: jax.Array,
    stored: Moments,
    codec: MomentCodec,
    axes: Axes,
    hyper: Hyper,
    noise: Noise,
    follow: Callable[[jax.Array], Any] = lambda direction: direction,
) -> tuple[Any, Moments]:
    """One step of some groups, in the one order that plain JAX, the kernel and the studies share.

    Args:
      grad: of any floating dtype.
      stored: the moments as they are kept.
      codec, axes, noise: as in `encode`.
      hyper: the scalars of the step.
      follow: what comes of the direction (float32): itself, or the next weight.

    Returns:
      What `follow` returns, and the moments to keep.
    """
    direction, moments = adam(grad.astype(jnp.float32), decode(stored, codec, axes), hyper)
    followed = follow(direction)  # before encoding: what only a weight needs has then left a kernel's registers
    return followed, encode(moments, codec, axes, grad == 0, noise)


def next_weight(weight: Weight, direction: jax.Array, keep: Master | None, rate: Rate, hyper: Hyper, noise: Noise) -> Weight:
    """The next weight as it is kept, with the operations of optax.adamw and optax.apply_updates in their order."""
    value = master.load(weight)
    decayed = direction + hyper.rounded(rate.weight_decay * value)
    value = value + hyper.rounded(-rate.learning_rate * decayed)
    bits = noise(NoiseUse.MASTER) if master.needs_noise(weight.param, keep) else None
    return master.store(value, weight.param, keep, bits)

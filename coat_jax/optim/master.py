"""Master weights: a parameter in bfloat16 and what it lacks of float32, elementwise and in integer arithmetic.

    bits(weight) = bits(param) << 16 + compensation        param bfloat16, weight float32, compensation int16

With 16 bits that is exact; with 8 the upper byte of the compensation is kept, rounded: a relative error of at most
2^-16 (1.5e-5).

Example, the weight 0.1:

    bits(weight)    0x3DCCCCCD     0.1
    param           0x3DCD         the nearest bfloat16, 0x3DCD0000 = 0.10009766
    compensation    -0x3333        0x3DCCCCCD - 0x3DCD0000 = -13107, an int16: nothing is lost
    with 8 bits     -0x33          -0x3333 in units of 0x100, rounded: read as 0x3DCCCD00 = 0.10000038
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.quant.rounding import finite


class Master(enum.StrEnum):
    """How a bfloat16 parameter keeps the updates that are too small for it."""

    BF16_8 = "bf16+8"
    """One more byte: 24 of the 32 bits of a float32 weight, 3 bytes together."""
    BF16_16 = "bf16+16"
    """Two more bytes: a float32 weight bit for bit."""
    STOCHASTIC = "bf16-stochastic"
    """Nothing more: the new parameter is rounded up or down at random, right on average."""

    @property
    def dtype(self) -> jnp.dtype | None:
        """dtype of the compensation; None where there is none."""
        return {Master.BF16_8: jnp.dtype(jnp.int8), Master.BF16_16: jnp.dtype(jnp.int16)}.get(self)

    @classmethod
    def resolve(cls, master: "Master | str | None") -> "Master | None":
        """The member of that name.

        Raises:
          ValueError: an unknown name.
        """
        try:
            return None if master is None else cls(master)
        except ValueError:
            names = ", ".join(repr(str(name)) for name in cls)
            raise ValueError(f"master={master!r} is unknown; use None or one of {names}") from None


class Weight(NamedTuple):
    """A parameter as it is kept: `param`, and `compensation` (int8, int16, or None where there is none)."""

    param: jax.Array
    compensation: jax.Array | None = None


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _upper(bits: jax.Array) -> jax.Array:
    """The bfloat16 in the upper half of the bits of a float32."""
    return jax.lax.bitcast_convert_type(bits & jnp.int32(-0x10000), jnp.float32).astype(jnp.bfloat16)


def load(weight: Weight) -> jax.Array:
    """The float32 value that a weight stands for."""
    value = weight.param.astype(jnp.float32)
    if weight.compensation is None:
        return value
    shift = 8 if weight.compensation.dtype == jnp.int8 else 0
    exact = jax.lax.bitcast_convert_type(_bits(value) + (weight.compensation.astype(jnp.int32) << shift), jnp.float32)
    return jnp.where(finite(value), exact, value)


def compensate(value: jax.Array, param: jax.Array, master: Master) -> jax.Array | None:
    """What `param` lacks of `value` (float32), as `master` keeps it; 0 where either is not finite."""
    if master.dtype is None:
        return None
    lack = _bits(value) - _bits(param)
    if master is Master.BF16_8:
        lack = (lack + 128) >> 8
    info = jnp.iinfo(master.dtype)
    known = finite(value) & finite(param.astype(jnp.float32))
    return jnp.where(known, jnp.clip(lack, info.min, info.max), 0).astype(master.dtype)


def nearest(value: jax.Array, master: Master, noise: jax.Array | None) -> jax.Array:
    """The bfloat16 parameter of a float32 weight: the nearest, or for `Master.STOCHASTIC` a neighbour, by noise in [0, 1).

    Ties, and with 8 bits what is within half a unit of them, go away from zero: what the parameter lacks then always fits.
    """
    half = jnp.int32(0x8080 if master is Master.BF16_8 else 0x8000)
    if master is Master.STOCHASTIC:
        assert noise is not None
        half = (noise * 2.0**16).astype(jnp.int32)
    return jnp.where(finite(value), _upper(_bits(value) + half), value.astype(jnp.bfloat16))


def store(value: jax.Array, like: jax.Array, master: Master | None, noise: jax.Array | None = None) -> Weight:
    """A float32 weight as it is kept: cast to the dtype of `like`, or split where that is bfloat16 and there is a master."""
    if not splits(like, master):
        return Weight(value.astype(like.dtype))
    assert master is not None
    param = nearest(value, master, noise)
    return Weight(param, compensate(value, param, master))


def splits(param: jax.Array, master: Master | None) -> bool:
    """Whether `master` has anything to do for this parameter: bfloat16 is split, other dtypes are left alone."""
    return master is not None and param.dtype == jnp.bfloat16


def zero(param: jax.Array, master: Master | None) -> jax.Array | None:
    """The compensation of a parameter that is exact."""
    if not splits(param, master) or master is None or master.dtype is None:
        return None
    return jnp.zeros_like(param, master.dtype)


def landing(
    value: jax.Array, old: jax.Array, master: Master, noise: jax.Array | None, dtype: Any = jnp.float32
) -> tuple[jax.Array, Weight]:
    """The update with which `optax.apply_updates` takes `old` to `value`, and the weight that it really yields.

    old + (new - old) is new where |new| >= 2^-16 |old|, with updates in bfloat16 where new is between old / 2 and 2 old (there
    the difference of two bfloat16 numbers is one); elsewhere the compensation makes up for what it can of the difference.

    Args:
      value: float32, what the weight is to be.
      old: the bfloat16 parameter.
      master: how the weight is kept.
      noise: in [0, 1), for `Master.STOCHASTIC`.
      dtype: of the update.
    """
    target = nearest(value, master, noise)
    update = (target.astype(jnp.float32) - old.astype(jnp.float32)).astype(dtype)
    sum_ = old.astype(jnp.float32) + update.astype(jnp.float32)
    landed = jax.lax.reduce_precision(sum_, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
    return update, Weight(landed, compensate(value, landed, master))


def needs_noise(param: jax.Array, master: Master | None) -> bool:
    """Whether storing this parameter takes random bits."""
    return master is Master.STOCHASTIC and splits(param, master)

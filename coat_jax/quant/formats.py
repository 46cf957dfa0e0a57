"""Payload number formats: what one stored code can be. The only place where 448 or 57344 exists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant.rounding import floor

TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32, 2^-126. Magnitudes below it count as zero everywhere, as they do where the hardware flushes them."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format of one byte.

    Attributes:
      name: the field's name for it.
      dtype: NumPy dtype of the payload.
      max: largest finite magnitude of a code.
      tiny: smallest positive magnitude of a code.
      mantissa_bits: explicit bits of the significand; None for the integer formats, whose codes are `tiny` apart.

    Example:
      >>> E4M3.max, E4M3.cast(jnp.float32(1e6)).astype(jnp.float32).item()
      (448.0, 448.0)
    """

    name: str
    dtype: np.dtype
    max: float
    tiny: float
    mantissa_bits: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def signed(self) -> bool:
        """Whether the format has codes below zero."""
        return self.dtype != np.uint8

    def cast(self, y: jax.Array) -> jax.Array:
        """The nearest code to y (float32), ties to even, saturating at ±max; NaN stays NaN, or is 0 in an integer format."""
        inside = jnp.clip(y, -self.max if self.signed else 0.0, self.max)
        if self.mantissa_bits is None:
            return jnp.where(jnp.isnan(y), 0.0, jnp.round(inside)).astype(self.dtype)
        return jnp.where(jnp.isnan(y), y, inside).astype(self.dtype)

    def neighbours(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The two neighbouring magnitudes, lower <= y <= upper, that the format represents exactly.

        Args:
          y: float32, 0 <= y <= max.
        """
        if self.mantissa_bits is None:
            ulp = jnp.full_like(y, self.tiny)
        else:
            exponent = jax.lax.bitcast_convert_type(y, jnp.int32) & 0x7F800000  # y rounded down to a power of two
            power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
            ulp = jnp.maximum(power * 2.0**-self.mantissa_bits, self.tiny)
        lower = floor(y / ulp) * ulp
        return lower, jnp.minimum(lower + ulp, self.max)


E4M3 = Format("e4m3", np.dtype(jnp.float8_e4m3fn), max=448.0, tiny=2.0**-9, mantissa_bits=3)
E5M2 = Format("e5m2", np.dtype(jnp.float8_e5m2), max=57344.0, tiny=2.0**-16, mantissa_bits=2)
INT8 = Format("int8", np.dtype(np.int8), max=127.0, tiny=1.0)
UINT8 = Format("uint8", np.dtype(np.uint8), max=255.0, tiny=1.0)

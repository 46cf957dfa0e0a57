"""Maps between a ratio r = |x| / amax in (0, 1] and the code domain (0, max]: how a group's range is laid over the codes.

Each map has one exponent per group, one byte, fitted to the group's smallest non-zero ratio. `expand` and `contract` are
inverse of each other and elementwise; both are traced by kernels as well.
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from coat_jax.quant.formats import TINY, Format
from coat_jax.quant.rounding import floor


class Expansion(Protocol):
    """A monotone map of (0, 1] onto codes, with a static description and at most one byte per group."""

    fitted: bool
    """Whether each group has an exponent of its own."""

    def fit(self, ratio: jax.Array) -> jax.Array:
        """Exponent of a group (float32, a whole number in 1..255) whose smallest non-zero ratio is `ratio`."""
        ...

    def expand(self, ratio: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """Magnitude in the code domain of a non-zero ratio."""
        ...

    def contract(self, y: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """Ratio that a non-zero magnitude in the code domain stands for."""
        ...


@dataclasses.dataclass(frozen=True)
class PowerExpansion:
    """COAT's dynamic range expansion: y = max * r^k, one k per group, so that the group's range fills the format's.

    k = log(target) / log(amax / amin), a multiple of 1/16 rounded down, in [1/16, 16). The stored exponent is 16 k.

    Attributes:
      target: the range amax / amin that a group has after expansion. E4M3 holds 448 / 2^-9 = 229,376; COAT's released
        kernels aim at 448^2 / 2 = 100,352, which keeps the smallest elements out of the coarsest codes.

    Raises:
      ValueError: `target` <= 1.

    Source: arXiv 2410.19313, section 4.
    """

    target: float = 100_352.0
    fitted = True

    def __post_init__(self):
        if not self.target > 1:
            raise ValueError(f"PowerExpansion: target={self.target}; a range is greater than 1 (COAT: 448**2 / 2)")

    def fit(self, ratio: jax.Array) -> jax.Array:
        """16 k for a group whose smallest non-zero ratio is `ratio`."""
        octaves = jnp.maximum(-jnp.log2(ratio), 1e-3)
        return jnp.clip(floor(16.0 * math.log2(self.target) / octaves), 1.0, 255.0)

    def expand(self, ratio: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """max * r^k."""
        assert exponent is not None
        return format.max * jnp.exp2(exponent * (1 / 16) * jnp.log2(ratio))

    def contract(self, y: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """(y / max)^(1/k)."""
        assert exponent is not None
        return jnp.exp2(jnp.log2(y * (1 / format.max)) * (16.0 / exponent))


@dataclasses.dataclass(frozen=True)
class LogRange:
    """A logarithmic grid for magnitudes: y = 1 + (max - 1) (1 + log2(r) / L), L the group's range in octaves.

    L is a multiple of 1/4, rounded up, in [1/4, octaves]; what lies below amax 2^-L takes code 1, so nothing but zero
    becomes zero. The stored exponent is 4 L.

    Attributes:
      octaves: largest range of a group, at most 63.75. A bound keeps live elements sharp where others of their group decay
        towards zero.

    Raises:
      ValueError: `octaves` outside [1/4, 63.75].
    """

    octaves: float = 24.0
    fitted = True

    def __post_init__(self):
        if not 0.25 <= self.octaves <= 63.75:
            raise ValueError(f"LogRange: octaves={self.octaves}; one byte holds 0.25 to 63.75")

    def fit(self, ratio: jax.Array) -> jax.Array:
        """4 L for a group whose smallest non-zero ratio is `ratio`."""
        return jnp.clip(-floor(4.0 * jnp.log2(ratio)), 1.0, 4 * self.octaves)

    def expand(self, ratio: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """1 + (max - 1) (1 + log2(r) / L) = max + (max - 1) log2(r) / L, at least 1."""
        assert exponent is not None
        # The sum's product is with 4, exact: a compiler may fuse the two or not, the bits are the same.
        y = format.max + 4.0 * (jnp.log2(ratio) * ((format.max - 1.0) * (1.0 / exponent)))
        return jnp.maximum(y, 1.0)

    def contract(self, y: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """2^(((y - 1) / (max - 1) - 1) L) = 2^((y - max) / (max - 1) L)."""
        assert exponent is not None
        return jnp.exp2((y - format.max) * (1 / (format.max - 1.0)) * exponent * (1 / 4))


@dataclasses.dataclass(frozen=True)
class Softsign:
    """Companding with the softsign: y = max * 2r / (1 + r). Finer near zero than near amax, no exponent."""

    fitted = False

    def fit(self, ratio: jax.Array) -> jax.Array:
        """Not called: nothing is fitted."""
        raise TypeError("Softsign has no exponent to fit")

    def expand(self, ratio: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """max * 2r / (1 + r)."""
        return format.max * (2.0 * ratio / (1.0 + ratio))

    def contract(self, y: jax.Array, exponent: jax.Array | None, format: Format) -> jax.Array:
        """(y / max) / (2 - y / max)."""
        return y / (2.0 * format.max - y)


def floor_ratio(amin: jax.Array, amax: jax.Array) -> jax.Array:
    """amin / amax kept a normal float32 in (0, 1]: 1 where the group has no finite non-zero element."""
    return jnp.where(amin < amax, jnp.maximum(amin / amax, TINY), 1.0)

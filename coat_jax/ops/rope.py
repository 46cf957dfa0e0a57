"""Rotary position embedding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Rotary frequencies of Llama 3.1 and later, lowered so that a longer context turns through angles known from training.

    Of a frequency f with wavelength w = 2 pi / f and L the original context: f / factor where w > L / low_freq_factor, f where
    w < L / high_freq_factor, and (1 - s) f / factor + s f between, s = (L / w - low) / (high - low).

    Attributes:
      factor: by how much the lowest frequencies are divided.
      low_freq_factor, high_freq_factor: how often a wave fits into the original context, where the two regimes end.
      original_max_position_embeddings: L, tokens.

    Raises:
      ValueError: factors or a context that say nothing.

    Example:
      >>> scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
      >>> print(scaling.scaled(np.array([1.0, 1e-5])))
      [1.00e+00 1.25e-06]

    Source: Llama 3.1's reference code; the names are those of Hugging Face's config.json.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        if not 1 <= self.factor < float("inf"):
            raise ValueError(f"Llama3Scaling: factor={self.factor}; use 1 or more")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not 0 < low < high < float("inf"):
            raise ValueError(f"Llama3Scaling: low_freq_factor={low}, high_freq_factor={high}; use 0 < low < high")
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                f"Llama3Scaling: original_max_position_embeddings={self.original_max_position_embeddings}; use 1 or more"
            )

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        """Frequencies in radians per token, float64, scaled."""
        # Llama 3.1 has L = 8192 and factors 1 and 4: waves over 8192 tokens are stretched by 8, waves of fewer than 2048
        # are left alone. A wave of 4096 tokens fits twice: s = (2 - 1) / (4 - 1), a third of the way from f / 8 to f.
        fits = self.original_max_position_embeddings * frequency / (2 * np.pi)
        s = np.clip((fits - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return (1 - s) * frequency / self.factor + s * frequency


def frequencies(dim: int, theta: float, scaling: Llama3Scaling | None = None) -> jax.Array:
    """theta^(-2i/dim) for i in 0 ... dim/2 - 1, scaled or not, in radians per token, float32."""
    if scaling is None:
        return theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    # Rounded once: between the regimes (1 - s) and factor would make float32's errors 32 times larger, and position 131,071
    # makes radians of them.
    return jnp.asarray(scaling.scaled(float(theta) ** (-np.arange(0, dim, 2) / dim)), jnp.float32)


def rotate(x: jax.Array, theta: float, sign: float, scaling: Llama3Scaling | None = None) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + d/2}) of position t by sign * t * theta^(-2i/d), in float32."""
    length, _, dim = x.shape[-3:]
    # Half-split pairs, as Hugging Face stores them: of d = 128, element 3 turns with element 67, by t theta^(-6/128). Meta's
    # files and GGUF have neighbours as pairs (6 with 7); their q and k kernels are reordered before they come here.
    frequency = frequencies(dim, theta, scaling)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :] * sign
    lead = (1,) * (x.ndim - 3)
    cos, sin = cos.reshape(lead + cos.shape), sin.reshape(lead + sin.shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rope(x: jax.Array, *, theta: float = 10_000.0, scaling: Llama3Scaling | None = None) -> jax.Array:
    """y_t = R(t) x_t: pairs (i, i + d/2) of each head turned by t * theta^(-2i/d). Nothing is kept: dx_t = R(-t) dy_t.

    Args:
      x: (..., tokens, heads, d), d even, any float dtype; computed in float32.
      theta: base of the frequencies.
      scaling: how the frequencies are scaled for contexts longer than the first one trained on; None is not.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: an odd d, or fewer than three axes.

    Source: arXiv 2104.09864, in the half-split layout of Llama.
    """
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(f"rope: x has shape {x.shape}; use (..., tokens, heads, d) with an even d")
    turn = jax.custom_vjp(lambda x: rotate(x, theta, 1.0, scaling))
    turn.defvjp(lambda x: (rotate(x, theta, 1.0, scaling), None), lambda _, g: (rotate(g, theta, -1.0, scaling),))
    return turn(x)

"""Rotary position embedding."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, theta: float, sign: float) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + d/2}) of position t by sign * t * theta^(-2i/d), in float32."""
    length, _, dim = x.shape[-3:]
    # Half-split pairs, as Hugging Face stores them: of d = 128, element 3 turns with element 67, by t theta^(-6/128). Meta's
    # files and GGUF have neighbours as pairs (6 with 7); their q and k kernels are reordered before they come here.
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :] * sign
    lead = (1,) * (x.ndim - 3)
    cos, sin = cos.reshape(lead + cos.shape), sin.reshape(lead + sin.shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rope(x: jax.Array, *, theta: float = 10_000.0) -> jax.Array:
    """y_t = R(t) x_t: pairs (i, i + d/2) of each head turned by t * theta^(-2i/d). Nothing is kept: dx_t = R(-t) dy_t.

    Args:
      x: (..., tokens, heads, d), d even, any float dtype; computed in float32.
      theta: base of the frequencies.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: an odd d, or fewer than three axes.

    Source: arXiv 2104.09864, in the half-split layout of Llama.
    """
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(f"rope: x has shape {x.shape}; use (..., tokens, heads, d) with an even d")
    turn = jax.custom_vjp(lambda x: rotate(x, theta, 1.0))
    turn.defvjp(lambda x: (rotate(x, theta, 1.0), None), lambda _, g: (rotate(g, theta, -1.0),))
    return turn(x)

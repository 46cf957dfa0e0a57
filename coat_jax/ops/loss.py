"""Cross entropy over a large vocabulary in chunks of tokens: the float32 logits of a whole batch never exist."""

import jax
import jax.numpy as jnp


def chunk_loss(h: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_t weights_t (logsumexp(h_t W) - (h_t W)[target_t]) of one chunk, float32 logits."""
    logits = jnp.dot(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return jnp.sum(weights * (jax.nn.logsumexp(logits, -1) - picked))


def cross_entropy(
    h: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array | None = None, *, chunk: int = 1024
) -> jax.Array:
    """L = sum_t w_t (logsumexp(h_t W) - (h_t W)[target_t]) / sum_t w_t, mean nats per token.

    The forward pass of a differentiated call computes each chunk's gradients at once, so that no logit is computed twice
    and none is kept: dh in h's dtype, dW in float32 while it is summed.

    Args:
      h: (..., hidden), what the output head reads.
      kernel: (hidden, vocabulary); the product runs in h's dtype with float32 results.
      targets: integers (...), in [0, vocabulary).
      weights: float32 (...), of each token; None is 1. A constant: no gradient flows into it.
      chunk: tokens whose logits exist at one time.

    Returns:
      A float32 scalar.

    Raises:
      ValueError: targets of another shape than h's tokens, or a chunk below 1.
    """
    if targets.shape != h.shape[:-1]:
        raise ValueError(f"cross_entropy: targets have shape {targets.shape}; h {h.shape} has tokens {h.shape[:-1]}")
    if chunk < 1:
        raise ValueError(f"cross_entropy: chunk={chunk} tokens; use 1 or more")
    tokens = targets.size
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    weights = jax.lax.stop_gradient(weights / jnp.sum(weights))
    chunk = max(1, min(chunk, tokens))
    fill = -tokens % chunk

    def split(x):
        x = x.reshape(tokens, *x.shape[targets.ndim :])
        return jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])

    rows = (split(targets), split(weights))
    return summed(split(h), kernel, *rows)


@jax.custom_vjp
def summed(h: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """`chunk_loss` summed over the leading axis of h, targets and weights."""

    def add(total, rows):
        return total + chunk_loss(rows[0], kernel, *rows[1:]), None

    return jax.lax.scan(add, jnp.float32(0), (h, targets, weights))[0]


def _forward(h, kernel, targets, weights):
    def add(carry, rows):
        total, dkernel = carry
        value, (dh, dw) = jax.value_and_grad(chunk_loss, (0, 1))(rows[0], kernel, *rows[1:])
        return (total + value, dkernel + dw.astype(jnp.float32)), dh

    start = (jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32))
    (total, dkernel), dh = jax.lax.scan(add, start, (h, targets, weights))
    return total, (dh, dkernel.astype(kernel.dtype))


def _backward(residual, g):
    dh, dkernel = residual
    return dh * g.astype(dh.dtype), dkernel * g.astype(dkernel.dtype), None, None


summed.defvjp(_forward, _backward)

"""Cross entropy over a large vocabulary in chunks of tokens: the float32 logits of a whole batch never exist."""

import math

import jax
import jax.numpy as jnp


def cross_entropy(
    h: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array | None = None, *, chunk: int = 1024
) -> jax.Array:
    """L = sum_t w_t (logsumexp(h_t W) - (h_t W)[target_t]) / sum_t w_t, mean nats per token.

    Differentiated, the forward pass computes each chunk's gradients at once, so that no logit is computed twice and none is
    kept: dh in h's dtype, dW summed in float32.

    Args:
      h: (..., tokens, hidden), what the output head reads.
      kernel: (hidden, vocabulary); products run in h's dtype with float32 results.
      targets: integers (..., tokens), in [0, vocabulary).
      weights: float32 of the targets' shape; None is 1 for every token. A constant: no gradient flows into it.
      chunk: about how many tokens' logits exist at one time. Chunks are cut along the token axis, every one through the
        whole batch, so that a batch may be sharded.

    Returns:
      A float32 scalar; 0, with gradients of 0, where the weights are all 0: nothing is learnt from padding.

    Raises:
      ValueError: targets of another shape than h's tokens, weights of another than the targets', no tokens, or a chunk below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> print(cross_entropy(jnp.zeros((1, 6, 8)), jnp.ones((8, 4)), jnp.zeros((1, 6), int)).round(4))  # log 4
      1.3863
    """
    if targets.shape != h.shape[:-1] or targets.ndim < 1:
        raise ValueError(f"cross_entropy: targets have shape {targets.shape}; h {h.shape} has tokens {h.shape[:-1]}")
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(
            f"cross_entropy: weights have shape {weights.shape}, targets {targets.shape}; give a weight per target"
        )
    if not targets.size:
        raise ValueError(f"cross_entropy: targets have shape {targets.shape}; the mean over no tokens is undefined")
    if chunk < 1:
        raise ValueError(f"cross_entropy: chunk={chunk} tokens; use 1 or more")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    total = jnp.sum(weights)
    weights = jax.lax.stop_gradient(weights / jnp.where(total == 0, 1.0, total))
    # Four sequences of 2048 tokens and chunk=1024: a chunk is 256 tokens of each sequence, and there are 8 of them. Its float32
    # logits are 1024 x 32,000 x 4 B = 131 MB for Llama 2's vocabulary, where those of the batch would be 1.05 GB.
    rows, tokens = math.prod(targets.shape[:-1]), targets.shape[-1]
    length = max(1, min(chunk // max(rows, 1), tokens))
    axis = targets.ndim - 1

    def split(x: jax.Array) -> jax.Array:
        """(..., tokens, ...) to (chunks, ..., length, ...); the last chunk is filled up with zeros, which weigh nothing."""
        fill = [(0, 0)] * x.ndim
        fill[axis] = (0, -tokens % length)
        x = jnp.pad(x, fill)
        chunks = x.shape[axis] // length
        return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, length, *x.shape[axis + 1 :]), axis, 0)

    return chunked(split(h), kernel, split(targets), split(weights))


def chunk_loss(h: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted loss of one chunk, and its gradient with respect to the logits, both float32."""
    logits = jnp.dot(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
    normalizer = jax.nn.logsumexp(logits, -1, keepdims=True)
    # A comparison instead of a gather: XLA fuses it with its neighbours, and a gather's gradient would be a scatter.
    hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    loss = jnp.sum(weights * (normalizer[..., 0] - jnp.sum(jnp.where(hit, logits, 0.0), -1)))
    return loss, (jnp.exp(logits - normalizer) - hit.astype(jnp.float32)) * weights[..., None]


@jax.custom_vjp
def chunked(h: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """The loss of all chunks, which lie along the leading axis of h, targets and weights."""

    def add(total, rows):
        return total + chunk_loss(rows[0], kernel, *rows[1:])[0], None

    return jax.lax.scan(add, jnp.float32(0), (h, targets, weights))[0]


def _forward(h, kernel, targets, weights):
    tokens = tuple(range(h.ndim - 2))  # of one chunk

    def add(carry, rows):
        total, dkernel = carry
        h, targets, weights = rows
        loss, dlogits = chunk_loss(h, kernel, targets, weights)
        dlogits = dlogits.astype(h.dtype)  # the products run in h's dtype, as those of the logits did
        dh = jax.lax.dot_general(dlogits, kernel.astype(h.dtype), (((h.ndim - 1,), (1,)), ((), ())))
        dims = ((tokens, tokens), ((), ()))
        dkernel += jax.lax.dot_general(h, dlogits, dims, preferred_element_type=jnp.float32)
        return (total + loss, dkernel), dh

    start = (jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32))
    (total, dkernel), dh = jax.lax.scan(add, start, (h, targets, weights))
    return total, (dh, dkernel.astype(kernel.dtype))


def _backward(residual, g):
    # Together: else XLA scales the kernel's gradient last, and its float32 sum lives through the whole backward pass.
    dh, dkernel = jax.lax.optimization_barrier(residual)
    return dh * g.astype(dh.dtype), dkernel * g.astype(dkernel.dtype), None, None


chunked.defvjp(_forward, _backward)

"""The Llama of `llama.py` in plain Flax, without an operation of this library: what memory is measured against."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from coat_jax.models import llama


def _rotate(x: jax.Array, theta: float) -> jax.Array:
    """x (batch, seq, heads, width) turned by its position, computed in f32."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / theta ** (jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1).astype(
        x.dtype
    )


class Layer(nn.Module):
    """One layer: attention, then SwiGLU, each behind an RMSNorm and added to what came in."""

    config: llama.Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """x: (batch, seq, hidden) -> the same."""
        c = self.config
        dense = functools.partial(nn.Dense, use_bias=False, dtype=c.dtype, param_dtype=c.param_dtype)
        norm = functools.partial(nn.RMSNorm, epsilon=c.norm_eps, dtype=c.dtype, param_dtype=c.param_dtype)
        width = c.hidden // c.heads
        h = norm(name="attention_norm")(x)
        heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        q, k, v = (dense(n * width, name=name)(h).reshape(*h.shape[:2], n, width) for name, n in heads.items())
        q, k = _rotate(q, c.rope_theta), _rotate(k, c.rope_theta)
        x = x + dense(c.hidden, name="o")(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        h = norm(name="mlp_norm")(x)
        gate, up = dense(c.intermediate, name="gate")(h), dense(c.intermediate, name="up")(h)
        return x + dense(c.hidden, name="down")(nn.silu(gate) * up), None


class Llama(nn.Module):
    """Logits and loss of a Llama, as one writes it with Flax and Optax alone. Layers in one scan.

    Attributes:
      config: the shape.
    """

    config: llama.Config

    def setup(self) -> None:
        """Declares the submodules."""
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.hidden, dtype=c.dtype, param_dtype=c.param_dtype)
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        self.layers = scan(c)
        self.norm = nn.RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, param_dtype=c.param_dtype)
        self.head = nn.Dense(c.vocab_size, use_bias=False, dtype=c.dtype, param_dtype=c.param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens int (batch, seq) -> logits f32 (batch, seq, vocab)."""
        x, _ = self.layers(self.embed(tokens), None)
        return self.head(self.norm(x)).astype(jnp.float32)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross entropy, nats per token."""
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self(tokens), targets))

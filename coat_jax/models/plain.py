"""The Llama of `llama.py` in plain Flax, with no arithmetic of this library: what memory is measured against."""

import enum
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from coat_jax import ops
from coat_jax.models import llama
from coat_jax.parallel import batch_sharded


class Remat(enum.StrEnum):
    """What the backward pass computes again instead of reading what the forward pass kept."""

    NONE = "none"
    """Nothing: JAX keeps what its autodiff reads."""
    DOTS = "dots"
    """All but weight products, the usual policy of JAX users; the attention output is kept as well."""
    LAYER = "layer"
    """Every layer, from its input."""

    def wrap(self, layer: type[nn.Module]) -> type[nn.Module]:
        """The layer with this behaviour, for a scan."""
        if self is Remat.NONE:
            return layer
        policies = jax.checkpoint_policies
        dots = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("attention")
        )
        return nn.remat(layer, policy=dots if self is Remat.DOTS else None, prevent_cse=False)


class RMSNorm(nn.Module):
    """x / rms(x) in float32, cast, then times scale in the dtype of the computation, as Llama is commonly written.

    `nn.RMSNorm` multiplies in float32 and keeps two more float32 arrays for its backward pass.
    """

    config: llama.Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., hidden) -> the same."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.config.param_dtype)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.config.norm_eps)
        return y.astype(self.config.dtype) * scale.astype(self.config.dtype)


def norm(config: llama.Config, name: str | None = None) -> nn.Module:
    """The norm that the configuration names; a LayerNorm has no parameters, as in OLMo."""
    if config.norm == ops.NormKind.LAYER:
        return nn.LayerNorm(config.norm_eps, dtype=config.dtype, use_bias=False, use_scale=False, name=name)
    return RMSNorm(config, name=name)


def _rotate(x: jax.Array, config: llama.Config) -> jax.Array:
    """x (batch, seq, heads, width) turned by its position, computed in f32."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / config.rope_theta ** (jnp.arange(half) / half)
    if config.rope_scaling is not None:
        angles = angles * _slowed(config.rope_theta ** (-jnp.arange(half) / half), config.rope_scaling)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1).astype(
        x.dtype
    )


def _slowed(frequency: jax.Array, scaling: ops.Llama3Scaling) -> jax.Array:
    """By how much Llama 3.1 multiplies each frequency: 1 for short waves, 1/factor for long ones, a mean between."""
    wave = 2 * jnp.pi / frequency
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    kept = (context / wave - low) / (high - low)
    between = (1 - kept) / scaling.factor + kept
    return jnp.where(wave > context / low, 1 / scaling.factor, jnp.where(wave < context / high, 1.0, between))


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each behind a norm and added to what came in."""

    config: llama.Config
    attention: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """x: (batch, seq, hidden) -> the same."""
        c = self.config
        x = batch_sharded(x)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=c.dtype, param_dtype=c.param_dtype)
        width = c.head_width
        h = norm(c, "attention_norm")(x)
        heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        biased = functools.partial(dense, use_bias=c.qkv_bias)
        q, k, v = (biased(n * width, name=name)(h).reshape(*h.shape[:2], n, width) for name, n in heads.items())
        if c.qk_norm:
            q, k = RMSNorm(c, name="q_norm")(q), RMSNorm(c, name="k_norm")(k)
        q, k = _rotate(q, c), _rotate(k, c)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=c.causal, implementation=self.attention)
        y = y.reshape(*x.shape[:2], c.heads * width)
        x = x + dense(c.hidden, use_bias=c.o_bias, name="o")(checkpoint_name(y, "attention"))
        h = norm(c, "mlp_norm")(x)
        gate, up = dense(c.intermediate, name="gate")(h), dense(c.intermediate, name="up")(h)
        return x + dense(c.hidden, name="down")(nn.silu(gate) * up), None


class Llama(nn.Module):
    """Logits and loss of a Llama, as one writes it with Flax and Optax alone. Layers in one scan.

    Attributes:
      config: the shape.
      remat: what the backward pass computes again.
      attention: implementation of `jax.nn.dot_product_attention`: None or "cudnn".
    """

    config: llama.Config
    remat: Remat = Remat.NONE
    attention: str | None = None

    def setup(self) -> None:
        """Declares the submodules."""
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.hidden, dtype=c.dtype, param_dtype=c.param_dtype)
        scan = nn.scan(self.remat.wrap(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        self.layers = scan(c, self.attention)
        self.norm = norm(c)
        if not c.tied_head:
            self.head = nn.Dense(c.vocab_size, use_bias=False, dtype=c.dtype, param_dtype=c.param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens int (batch, seq) -> logits f32 (batch, seq, vocab)."""
        x, _ = self.layers(self.embed(tokens), None)
        h = self.norm(x)
        return (self.embed.attend(h) if self.config.tied_head else self.head(h)).astype(jnp.float32)

    def loss(self, tokens: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy, nats per token; with weights the weighted mean."""
        losses = optax.softmax_cross_entropy_with_integer_labels(self(tokens), targets)
        return jnp.mean(losses) if weights is None else jnp.sum(losses * weights) / jnp.sum(weights)

"""Llama in Flax Linen: RMSNorm, rotary positions, grouped-query attention, SwiGLU; layers in one scan.

    x = embed(tokens)
    x = x + o(attention(rope(q(norm(x))), rope(k(norm(x))), v(norm(x))))        for each layer
    x = x + down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

The residual stream, embedding, head and final norm stay in the dtype of the computation; what the layers keep and multiply
is the recipe's.

Source: arXiv 2302.13971 (Llama), 2307.09288 (Llama 2).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from coat_jax import ops, recipes
from coat_jax.linen import FP8SwiGLU, Kernel
from coat_jax.ops import Recipe


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a Llama.

    Attributes:
      vocab_size, hidden, intermediate, layers, heads, kv_heads: as in the paper; heads a multiple of kv_heads.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of the norms.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.

    Raises:
      ValueError: sizes that do not fit together.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        for name in ("vocab_size", "hidden", "intermediate", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"llama.Config: {name}={getattr(self, name)}; use 1 or more")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"llama.Config: hidden={self.hidden} over heads={self.heads}; each head needs an even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"llama.Config: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


def preset(name: str, **changes: Any) -> Config:
    """The configuration of that name, some fields changed.

    Raises:
      ValueError: an unknown name.

    Example:
      >>> preset("llama2-7b").layers
      32
    """
    known = {
        "tiny": Config(256, 128, 384, 4, 4, 2),
        "llama2-7b": Config(32_000, 4096, 11_008, 32, 32, 32),
    }
    if name not in known:
        raise ValueError(f"preset={name!r} is unknown; use one of {', '.join(known)}")
    return dataclasses.replace(known[name], **changes)


class Norm(nn.Module):
    """The scale of an RMSNorm, as a prologue of the product that reads it."""

    config: Config

    @nn.compact
    def __call__(self, recipe: Recipe) -> ops.Prologue:
        """The norm, its input kept as the recipe says."""
        scale = self.param("scale", nn.initializers.ones, (self.config.hidden,), self.config.param_dtype)
        fn = functools.partial(ops.normalize_rms, eps=self.config.norm_eps)
        return ops.Prologue(fn, recipe.nonlinear_input, (scale,))


class Attention(nn.Module):
    """Causal grouped-query attention: parameters q, k, v, o, each with a kernel."""

    config: Config
    recipe: Recipe

    @nn.compact
    def __call__(self, x: jax.Array, norm: ops.Prologue) -> jax.Array:
        """(batch, tokens, hidden) to the same shape."""
        c, recipe = self.config, self.recipe
        widths = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        kernels = [Kernel(n * c.head_dim, c.param_dtype, name=name)(c.hidden) for name, n in widths.items()]
        o = Kernel(c.hidden, c.param_dtype, name="o")(c.hidden)
        q, k, v = ops.linear([x], kernels, recipe, prologue=norm)
        q, k, v = (y.reshape(*y.shape[:-1], -1, c.head_dim) for y in (q, k, v))
        q, k = (ops.rope(y, theta=c.rope_theta) for y in (q, k))
        [y] = ops.attention_linear(q, k, v, [o], recipe)
        return y


class Layer(nn.Module):
    """One layer: attention and SwiGLU, each after a norm and added to the residual stream."""

    config: Config
    recipe: Recipe

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        """(batch, tokens, hidden) to the same shape, and nothing else for the scan to collect."""
        c, recipe = self.config, self.recipe
        x = x + Attention(c, recipe, name="attention")(x, Norm(c, name="attention_norm")(recipe))
        mlp = FP8SwiGLU(c.intermediate, dtype=c.dtype, param_dtype=c.param_dtype, recipe=recipe, name="mlp")
        return x + mlp(x, norm=Norm(c, name="mlp_norm")(recipe)), None


class Llama(nn.Module):
    """A Llama language model.

    Attributes:
      config: sizes; see `preset`.
      recipe: what the layers quantize.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.models import llama
      >>> model = llama.Llama(llama.preset("tiny"))
      >>> tokens = jnp.zeros((1, 16), jnp.int32)
      >>> params = model.init(jax.random.key(0), tokens)["params"]
      >>> model.apply({"params": params}, tokens).shape
      (1, 16, 256)
    """

    config: Config
    recipe: Recipe = recipes.coat()

    def setup(self):
        """Declares embedding, layers, final norm and head."""
        c = self.config
        self.embed = nn.Embed(
            c.vocab_size, c.hidden, dtype=c.dtype, param_dtype=c.param_dtype, embedding_init=nn.initializers.normal(0.02)
        )
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        self.layers = scan(c, self.recipe)
        self.norm = nn.RMSNorm(c.norm_eps, dtype=c.dtype, param_dtype=c.param_dtype)
        self.head = Kernel(c.vocab_size, c.param_dtype)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """What the head reads, (batch, tokens, hidden), of integer tokens (batch, tokens)."""
        x, _ = self.layers(self.embed(tokens))
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits (batch, tokens, vocabulary) of integer tokens (batch, tokens)."""
        h = self.hidden(tokens)
        kernel = self.head(self.config.hidden).astype(h.dtype)
        return jnp.dot(h, kernel, preferred_element_type=jnp.float32)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross entropy in nats per token, float32, of tokens and targets (batch, tokens)."""
        return ops.cross_entropy(self.hidden(tokens), self.head(self.config.hidden), targets)

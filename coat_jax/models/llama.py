"""Llama in Flax Linen: RMSNorm, rotary positions, grouped-query attention, SwiGLU; layers in one scan.

    x = embed(tokens)
    x = x + o(attention(rope(q(norm(x))), rope(k(norm(x))), v(norm(x))))        for each layer
    x = x + down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

Mistral, Qwen2 and Qwen3 are this with other sizes, biases of q, k and v, or norms of each head before the rotation.

The residual stream, embedding, head and final norm stay in the dtype of the computation; what the layers keep and multiply
is the recipe's.

Source: arXiv 2302.13971 (Llama), 2307.09288 (Llama 2).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from coat_jax import ops, recipes
from coat_jax.linen import FP8Embed, Kernel, NormScale, WithRecipe, declare_block
from coat_jax.ops import Llama3Scaling, NormKind, Recipe
from coat_jax.parallel import batch_sharded, batch_shards

LOSS_CHUNK = 1024
"""Tokens of one device whose logits exist at one time."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a Llama, or of what is one but for an option: OLMo, Mistral, Qwen2 and Qwen3.

    Attributes:
      vocab_size, hidden, intermediate, layers, heads, kv_heads: as in the paper; heads a multiple of kv_heads.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of the norms.
      norm: "rms", or "layer" for LayerNorm without parameters.
      causal: whether a token sees earlier tokens only.
      tied_head: whether the head is the embedding, transposed.
      head_dim: features of a head; None is hidden / heads. `head_width` is the number in either case.
      rope_scaling: how the rotary frequencies are scaled for longer contexts, as in Llama 3.1; None is not.
      qkv_bias, o_bias: whether q, k and v have a bias, as in Qwen2, and whether the attention's output has one.
      qk_norm: whether each head of q and of k goes through an RMSNorm before the rotation, as in Qwen3.
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
    norm: str = "rms"
    causal: bool = True
    tied_head: bool = False
    head_dim: int | None = None
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        for name in ("vocab_size", "hidden", "intermediate", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"llama.Config: {name}={getattr(self, name)}; use 1 or more")
        object.__setattr__(self, "norm", NormKind.resolve(self.norm))
        if self.head_dim is None and self.hidden % (2 * self.heads):
            raise ValueError(f"llama.Config: hidden={self.hidden} over heads={self.heads}; each head needs an even width")
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise ValueError(f"llama.Config: head_dim={self.head_dim}; each head needs an even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"llama.Config: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim


def presets() -> dict[str, Config]:
    """Configurations by name.

    Sources: arXiv 2302.13971 (llama-30b), 2307.09288 (llama2), 2407.21783 (llama3), 2402.00838 (olmo), 2502.02737 (smollm2),
    2412.15115 (qwen2.5), 2505.09388 (qwen3); config.json of the published weights (llama3.1, llama3.2, mistral).
    """
    llama3 = Config(128_256, 4096, 14_336, 32, 32, 8, rope_theta=500_000.0)
    llama32 = dataclasses.replace(llama3, tied_head=True, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))
    qwen = functools.partial(Config, vocab_size=151_936, rope_theta=1_000_000.0, norm_eps=1e-6)
    qwen2, qwen3 = functools.partial(qwen, qkv_bias=True), functools.partial(qwen, head_dim=128, qk_norm=True)
    return {
        "tiny": Config(256, 128, 384, 4, 4, 2),
        "llama2-7b": Config(32_000, 4096, 11_008, 32, 32, 32),
        "llama2-13b": Config(32_000, 5120, 13_824, 40, 40, 40),
        "llama-30b": Config(32_000, 6656, 17_920, 60, 52, 52, norm_eps=1e-6),
        "llama3-8b": llama3,
        "llama3.1-8b": dataclasses.replace(llama3, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        "llama3.2-1b": dataclasses.replace(llama32, hidden=2048, intermediate=8192, layers=16),
        "llama3.2-3b": dataclasses.replace(llama32, hidden=3072, intermediate=8192, layers=28, heads=24),
        "smollm2-135m": Config(49_152, 576, 1536, 30, 9, 3, rope_theta=100_000.0, tied_head=True),
        "mistral-7b": Config(32_768, 4096, 14_336, 32, 32, 8, rope_theta=1_000_000.0),
        "qwen2.5-0.5b": qwen2(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, tied_head=True),
        "qwen2.5-7b": qwen2(hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, vocab_size=152_064),
        "qwen3-0.6b": qwen3(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, tied_head=True),
        "qwen3-8b": qwen3(hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8),
        "qwen3-32b": qwen3(hidden=5120, intermediate=25_600, layers=64, heads=64, kv_heads=8),
        "olmo-1b": Config(50_304, 2048, 8192, 16, 16, 16, norm="layer", tied_head=True),
        "olmo-7b": Config(50_304, 4096, 11_008, 32, 32, 32, norm="layer"),
    }


def preset(name: str, **changes: Any) -> Config:
    """The configuration of that name, some fields changed.

    Raises:
      ValueError: an unknown name.

    Example:
      >>> preset("llama2-7b").layers
      32
    """
    known = presets()
    if name not in known:
        raise ValueError(f"preset={name!r} is unknown; use one of {', '.join(known)}")
    return dataclasses.replace(known[name], **changes)


def apply_layer(params: Any, x: jax.Array, config: Config, recipe: Recipe, *, input_only: bool = False) -> jax.Array:
    """One layer of the model: `ops.blocks.transformer_block` of its parameters, x (batch, tokens, hidden) to the same shape.

    Args:
      params: of the layer.
      x: the residual stream; its sequences stay on their devices.
      config: sizes.
      recipe: what is quantized and kept.
      input_only: keep nothing of the layer but its input, as `recipe.layer_input`, and run the layer again from it.
    """

    def run(x, params):
        return ops.blocks.transformer_block(params, x, config, recipe)

    if input_only:
        run = ops.stashed(run, [recipe.layer_input], implementation=recipe.implementation)
    return run(batch_sharded(x), params)


class ScannedBlock(nn.Module):
    """A layer as the body of a scan: declares its parameters and calls `apply_layer`.

    Attributes:
      config: sizes.
      recipe: what is quantized and kept.
      input_only: as in `apply_layer`.
    """

    config: Config
    recipe: Recipe
    input_only: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        """(batch, tokens, hidden) to the same shape, and nothing for the scan to collect."""
        c = self.config
        params = declare_block(c, c.hidden, param_dtype=c.param_dtype, kernel_init=nn.initializers.lecun_normal())
        if self.is_initializing():
            return x, None  # the parameters are all that is wanted
        return apply_layer(params, x, c, self.recipe, input_only=self.input_only), None


class Llama(WithRecipe, nn.Module):
    """A Llama language model.

    Attributes:
      config: sizes; see `preset`.
      recipe: what the layers quantize and keep.
      remat: None: the recipe alone decides what is kept. "layer": each layer's input only, in FP8. A policy such as
        `coat_jax.remat_policy` or one of `jax.checkpoint_policies`: what `jax.checkpoint` with it keeps.

    Raises:
      ValueError: another string as `remat`.

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
    remat: str | Callable[..., Any] | None = None

    def setup(self):
        """Declares embedding, layers, final norm and head."""
        if isinstance(self.remat, str) and self.remat != "layer":
            raise ValueError(f"Llama: remat={self.remat!r}; use None, 'layer' or a jax.checkpoint policy")
        c = self.config
        init = nn.initializers.normal(0.02)
        dtypes = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        self.embed = FP8Embed(c.vocab_size, c.hidden, embedding_init=init, recipe=self.recipe, **dtypes)
        layer = nn.remat(ScannedBlock, policy=self.remat, prevent_cse=False) if callable(self.remat) else ScannedBlock
        scan = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers, check_constancy_invariants=False
        )
        self.layers = scan(c, self.recipe, self.remat == "layer")
        self.norm = NormScale(c.norm, c.param_dtype)
        if not c.tied_head:
            self.head = Kernel(c.vocab_size, param_dtype=c.param_dtype)

    def last_norm(self, x: jax.Array) -> jax.Array:
        """The norm of the residual stream (..., hidden) that the head reads."""
        c = self.config
        norm = ops.blocks.norm_prologue(self.norm(c.hidden), c.norm, c.norm_eps, self.recipe)
        return norm.fn(x, *norm.params)

    def head_kernel(self) -> jax.Array:
        """The kernel of the head, (hidden, vocabulary)."""
        return self.embed.embedding.T if self.config.tied_head else self.head(self.config.hidden)["kernel"]

    def trunk(self, tokens: jax.Array) -> jax.Array:
        """The residual stream behind the last layer, (batch, tokens, hidden).

        Args:
          tokens: integers (batch, tokens); or embeddings (batch, tokens, hidden), floating point, in their place: images behind
            an encoder, soft prompts.

        Raises:
          ValueError: embeddings of another width.
        """
        x, _ = self.layers(self.embeddings(tokens))
        return x

    def embeddings(self, tokens: jax.Array) -> jax.Array:
        """What the first layer reads: rows of the embedding for integer tokens, embeddings as they are; see `trunk`."""
        if jnp.issubdtype(tokens.dtype, jnp.integer):
            return self.embed(tokens)
        if tokens.ndim != 3 or tokens.shape[-1] != self.config.hidden:
            raise ValueError(f"Llama: embeddings of shape {tokens.shape}; use (batch, tokens, {self.config.hidden})")
        return tokens.astype(self.config.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits (batch, tokens, vocabulary) of tokens or embeddings; see `trunk`."""
        h = self.last_norm(self.trunk(tokens))
        return jnp.dot(h, self.head_kernel().astype(h.dtype), preferred_element_type=jnp.float32)

    def head_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy in nats per token, float32, of the residual stream behind the last layer; see `loss`."""
        chunk = LOSS_CHUNK * batch_shards()  # of tokens over all devices: each chunk ends in an exchange of the head's gradient
        return ops.cross_entropy(self.last_norm(x), self.head_kernel(), targets, weights, chunk=chunk)

    def loss(self, tokens: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy in nats per token, float32.

        Args:
          tokens: integers (batch, tokens), or embeddings; see `trunk`.
          targets: integers (batch, tokens).
          weights: of each token, float32 (batch, tokens), 0 for padding: the loss is the weighted mean. None is 1 for all.
        """
        return self.head_loss(self.trunk(tokens), targets, weights)

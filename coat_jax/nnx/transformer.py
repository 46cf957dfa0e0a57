"""A decoder layer: attention and SwiGLU, each after a norm and added to the residual stream. Skins over `ops.blocks`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax.nnx.mlp import FP8SwiGLU
from coat_jax.nnx.parameters import given_recipe, parameters
from coat_jax.ops import Llama3Scaling, NormKind, Prologue, Recipe, blocks

SIZES = ("heads", "kv_heads", "head_dim", "rope_theta", "rope_scaling", "causal", "qkv_bias", "o_bias", "qk_norm")
"""What `ops.blocks.self_attention` has to know of a module, but for the epsilon of its norms."""


class FP8SelfAttention(nnx.Module):
    """o = attention(rope(x W_q), rope(x W_k), x W_v) W_o with grouped queries; q, k and v share one FP8 input.

    Parameters: `q`, `k`, `v`, `o`, each with a `kernel` of two axes and perhaps a `bias`; with `qk_norm` also `q_norm` and
    `k_norm`, each with a `scale`.

    Args:
      in_features: width of input and result.
      heads, kv_heads: heads of q, and of k and v.
      rope_theta: base of the rotary frequencies; None is no rotation.
      causal: whether a token sees earlier tokens only.
      head_dim: features of a head; None is those of the input over `heads`.
      rope_scaling: how the rotary frequencies are scaled for longer contexts; None is not.
      qkv_bias, o_bias: whether q, k and v have a bias, and whether the output has one.
      qk_norm: whether each head of q and of k goes through an RMSNorm before the rotation, as in Qwen3.
      norm_eps: epsilon of these norms.
      recipe: what is quantized and kept; None is `recipes.coat()`.
      rngs: of the initial values.
      options: `param_dtype`, `kernel_init` and `kernel_metadata` of the kernels, as in `flax.nnx.Linear`.

    Raises:
      TypeError: a recipe that is none.
      ValueError: a width that the heads do not divide, where there is no `head_dim`.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        kv_heads: int,
        *,
        rope_theta: float | None = 10_000.0,
        causal: bool = True,
        head_dim: int | None = None,
        rope_scaling: Llama3Scaling | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.recipe = given_recipe(self, recipe)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rope_theta, self.rope_scaling, self.causal = rope_theta, rope_scaling, causal
        self.qkv_bias, self.o_bias, self.qk_norm, self.norm_eps = qkv_bias, o_bias, qk_norm, norm_eps
        shapes = blocks.attention_shapes(self, in_features)
        for name, (width, out) in shapes.items():
            bias = o_bias if name == "o" else qkv_bias
            setattr(self, name, nnx.Linear(width, out, use_bias=bias, rngs=rngs, **options))
        if qk_norm:
            dtype = {name: value for name, value in options.items() if name == "param_dtype"}
            self.q_norm, self.k_norm = (nnx.RMSNorm(shapes["q"][1] // heads, rngs=rngs, **dtype) for _ in range(2))

    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(batch, tokens, features) to the same shape; `norm` is applied to x first, inside the op that consumes it."""
        return blocks.self_attention(parameters(self), x, self, self.recipe, norm)


class FP8TransformerBlock(nnx.Module):
    """x <- x + attention(norm(x)); x <- x + swiglu(norm(x)).

    Parameters: `attention_norm`, `attention` (q, k, v, o), `mlp_norm`, `mlp` (gate, up, down).

    Args:
      in_features: width of input and result.
      heads, kv_heads, rope_theta, causal, head_dim, rope_scaling, qkv_bias, o_bias, qk_norm: as in `FP8SelfAttention`.
      intermediate: width of the SwiGLU.
      norm: "rms", or "layer" for LayerNorm without parameters.
      norm_eps: epsilon of all norms.
      recipe, rngs, options: as in `FP8SelfAttention`. The computation runs in x's dtype.

    Raises:
      TypeError: a recipe that is none.
      ValueError: another norm; a width that the heads do not divide, where there is no `head_dim`.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        kv_heads: int,
        intermediate: int,
        *,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
        **options: Any,
    ):
        self.recipe, self.norm, self.norm_eps, self.intermediate = given_recipe(self, recipe), norm, norm_eps, intermediate
        names = ("kernel_init", "kernel_metadata")
        kernels = {name: value for name, value in options.items() if name in names} | {"param_dtype": param_dtype}
        more: dict[str, Any] = {"norm_eps": norm_eps, "recipe": self.recipe, "rngs": rngs, "param_dtype": param_dtype}
        self.attention = FP8SelfAttention(in_features, heads, kv_heads, **more, **options)
        for name in SIZES:
            setattr(self, name, getattr(self.attention, name))
        self.mlp = FP8SwiGLU(in_features, intermediate, recipe=self.recipe, rngs=rngs, **kernels)
        if NormKind.resolve(norm) is NormKind.RMS:
            scales = (nnx.RMSNorm(in_features, param_dtype=param_dtype, rngs=rngs) for _ in range(2))
            self.attention_norm, self.mlp_norm = scales

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, tokens, features) to the same shape."""
        sizes: Any = self
        return blocks.transformer_block(parameters(self), x, sizes, self.recipe)

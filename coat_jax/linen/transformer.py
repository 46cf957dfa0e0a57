"""A decoder layer: attention and SwiGLU, each after a norm and added to the residual stream. Skins over `ops.blocks`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import recipes
from coat_jax.linen.parameters import Kernels, WithRecipe, declare_kernels
from coat_jax.ops import NormKind, Prologue, Recipe, blocks


class NormScale(nn.Module):
    """The parameters of a norm without the norm: for blocks that apply it inside the products that read it.

    Parameters: a `scale` where the norm is "rms", none where it is "layer" (LayerNorm without parameters, as OLMo has it).

    Attributes:
      kind: "rms" or "layer".
      param_dtype: dtype of the scale.

    Raises:
      ValueError: another kind.
    """

    kind: str = "rms"
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, features: int) -> dict[str, jax.Array]:
        """{"scale": (features,)}, or {}."""
        if NormKind.resolve(self.kind) is NormKind.LAYER:
            return {}
        return {"scale": self.param("scale", nn.initializers.ones, (features,), self.param_dtype)}


def declare_block(sizes: blocks.BlockSizes, width: int, *, param_dtype: Any, kernel_init: Any) -> dict[str, Any]:
    """The parameters of `ops.blocks.transformer_block` for inputs of `width` features, in the module that is being run."""
    options = {"param_dtype": param_dtype, "kernel_init": kernel_init}
    attention, mlp = blocks.attention_shapes(sizes, width), blocks.swiglu_shapes(sizes.intermediate, width)
    return {
        "attention_norm": NormScale(sizes.norm, param_dtype, name="attention_norm")(width),
        "attention": Kernels(tuple(attention.items()), **options, name="attention")(),
        "mlp_norm": NormScale(sizes.norm, param_dtype, name="mlp_norm")(width),
        "mlp": Kernels(tuple(mlp.items()), **options, name="mlp")(),
    }


class FP8SelfAttention(WithRecipe, nn.Module):
    """o = attention(rope(x W_q), rope(x W_k), x W_v) W_o with grouped queries; q, k and v share one FP8 input.

    Parameters: `q`, `k`, `v`, `o`, each with a `kernel` of two axes.

    Attributes:
      heads, kv_heads: heads of q, and of k and v.
      rope_theta: base of the rotary frequencies; None is no rotation.
      causal: whether a token sees earlier tokens only.
      param_dtype, kernel_init: of the kernels.
      recipe: what is quantized and kept.
    """

    heads: int
    kv_heads: int
    rope_theta: float | None = 10_000.0
    causal: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(batch, tokens, features) to the same shape; `norm` is applied to x first, inside the op that consumes it."""
        shapes = blocks.attention_shapes(self, x.shape[-1])
        params = declare_kernels(shapes, param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        return blocks.self_attention(params, x, self, self.recipe, norm)


class FP8TransformerBlock(WithRecipe, nn.Module):
    """x <- x + attention(norm(x)); x <- x + swiglu(norm(x)).

    Parameters: `attention_norm`, `attention` (q, k, v, o), `mlp_norm`, `mlp` (gate, up, down).

    Attributes:
      heads, kv_heads, rope_theta, causal: of the attention; see `FP8SelfAttention`.
      intermediate: width of the SwiGLU.
      norm: "rms", or "layer" for LayerNorm without parameters.
      norm_eps: epsilon of the norms.
      param_dtype, kernel_init: of the parameters. The computation runs in x's dtype.
      recipe: what is quantized and kept.
    """

    heads: int
    kv_heads: int
    intermediate: int
    rope_theta: float | None = 10_000.0
    causal: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-5
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, tokens, features) to the same shape."""
        params = declare_block(self, x.shape[-1], param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        return blocks.transformer_block(params, x, self, self.recipe)

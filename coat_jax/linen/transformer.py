"""A decoder layer: attention and SwiGLU, each after a norm and added to the residual stream."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import ops, recipes
from coat_jax.linen.mlp import FP8SwiGLU
from coat_jax.linen.parameters import Kernel, WithRecipe
from coat_jax.ops import Prologue, Recipe


class NormPrologue(nn.Module):
    """A norm as the prologue of the products that read it.

    Parameters: a `scale` where the norm is "rms", none where it is "layer" (LayerNorm without parameters, as OLMo has it).

    Attributes:
      kind: "rms" or "layer".
      epsilon: added to the mean square or variance.
      param_dtype: dtype of the scale.

    Raises:
      ValueError: another kind.
    """

    kind: str = "rms"
    epsilon: float = 1e-5
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, features: int, recipe: Recipe) -> Prologue:
        """The norm of (..., features), its input kept as the recipe says."""
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"norm={self.kind!r} is unknown; use 'rms' or 'layer'")
        if self.kind == "layer":
            return Prologue(ops.NormFunction(functools.partial(ops.normalize_layer, eps=self.epsilon)), recipe.nonlinear_input)
        scale = self.param("scale", nn.initializers.ones, (features,), self.param_dtype)
        norm = ops.NormFunction(functools.partial(ops.normalize_rms, eps=self.epsilon))
        return Prologue(norm, recipe.nonlinear_input, (scale,))


class FP8SelfAttention(WithRecipe, nn.Module):
    """o = attention(rope(x W_q), rope(x W_k), x W_v) W_o with grouped queries; q, k and v share one FP8 input.

    q and k are kept after their rotation: what is kept is as large before as after, and so the backward pass need not rotate
    them again. Parameters: `q`, `k`, `v`, `o`, each with a `kernel` of two axes.

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
        width = x.shape[-1]
        head = width // self.heads
        kernel = functools.partial(Kernel, param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        widths = {"q": self.heads * head, "k": self.kv_heads * head, "v": self.kv_heads * head}
        kernels = [kernel(n, name=name)(width)[0] for name, n in widths.items()]
        out, _ = kernel(width, name="o")(self.heads * head)
        q, k, v = (
            y.reshape(*y.shape[:-1], y.shape[-1] // head, head) for y in ops.linear([x], kernels, self.recipe, prologue=norm)
        )
        if self.rope_theta is not None:
            q, k = (ops.rope(y, theta=self.rope_theta) for y in (q, k))
        [y] = ops.attention_linear(q, k, v, [out], self.recipe, causal=self.causal)
        return y


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
        common = {"param_dtype": self.param_dtype, "kernel_init": self.kernel_init, "recipe": self.recipe}
        norm = functools.partial(NormPrologue, self.norm, self.norm_eps, self.param_dtype)
        attention = FP8SelfAttention(self.heads, self.kv_heads, self.rope_theta, self.causal, **common, name="attention")
        x = ops.add(x, attention(x, norm(name="attention_norm")(x.shape[-1], self.recipe)))
        mlp = FP8SwiGLU(self.intermediate, **common, name="mlp")
        return ops.add(x, mlp(x, norm(name="mlp_norm")(x.shape[-1], self.recipe)))

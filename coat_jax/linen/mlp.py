"""Feed-forward blocks. Skins over `coat_jax.ops.blocks`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import recipes
from coat_jax.linen.parameters import Kernel, WithRecipe, declare_kernels
from coat_jax.ops import Prologue, Recipe, blocks


class FP8SwiGLU(WithRecipe, nn.Module):
    """y = (silu(x W_gate) * x W_up) W_down; gate and up share one FP8 input, and FP8 of both is kept.

    Parameters: `gate`, `up`, `down`, each with a `kernel`, as three `flax.linen.Dense` without bias have them.

    Attributes:
      intermediate: width between.
      features: width of the result; None is the input's.
      dtype: dtype of the computation; None is the input's.
      param_dtype: dtype of the kernels.
      kernel_init: initializer of the kernels.
      recipe: what is quantized.
    """

    intermediate: int
    features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(..., in) to (..., features); `norm` is applied to x first, inside the op that consumes it."""
        x = x if self.dtype is None else x.astype(self.dtype)
        shapes = blocks.swiglu_shapes(self.intermediate, x.shape[-1], self.features)
        params = declare_kernels(shapes, param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        return blocks.swiglu_mlp(params, x, self.recipe, norm)


class FP8MLP(WithRecipe, nn.Module):
    """y = gelu(x W_in + b_in) W_out + b_out; FP8 of the input and of what gelu reads is kept.

    Parameters: `in` and `out`, each with `kernel` and `bias`, as two `flax.linen.Dense` have them.

    Attributes:
      intermediate: width between.
      features: width of the result; None is the input's.
      approximate: whether gelu is the tanh approximation.
      use_bias: whether both layers have a bias.
      dtype: dtype of the computation; None is the input's.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernels.
      recipe: what is quantized.
    """

    intermediate: int
    features: int | None = None
    approximate: bool = True
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(..., in) to (..., features); `norm` is applied to x first, inside the op that consumes it."""
        x = x if self.dtype is None else x.astype(self.dtype)
        out = x.shape[-1] if self.features is None else self.features
        shapes = {"in": (x.shape[-1], self.intermediate), "out": (self.intermediate, out)}
        options = {"use_bias": self.use_bias, "param_dtype": self.param_dtype, "kernel_init": self.kernel_init}
        params = {name: Kernel(n, name=name, **options)(width) for name, (width, n) in shapes.items()}
        return blocks.gelu_mlp(params, x, self.recipe, norm, approximate=self.approximate)

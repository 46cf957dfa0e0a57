"""Feed-forward blocks. Skins over `coat_jax.ops`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import ops, recipes
from coat_jax.linen.parameters import Kernel, WithRecipe, plus_bias
from coat_jax.ops import Prologue, Recipe


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
        kernel = functools.partial(Kernel, param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        (gate, _), (up, _) = (kernel(self.intermediate, name=name)(x.shape[-1]) for name in ("gate", "up"))
        down, _ = kernel(x.shape[-1] if self.features is None else self.features, name="down")(self.intermediate)
        gate_up = ops.linear([x], [gate, up], self.recipe, prologue=norm)
        [y] = ops.linear(
            gate_up, [down], self.recipe, prologue=Prologue(ops.Elementwise(ops.gate_silu), self.recipe.nonlinear_input)
        )
        return y


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
        kernel = functools.partial(Kernel, use_bias=self.use_bias, param_dtype=self.param_dtype, kernel_init=self.kernel_init)
        first, first_bias = kernel(self.intermediate, name="in")(x.shape[-1])
        second, second_bias = kernel(x.shape[-1] if self.features is None else self.features, name="out")(self.intermediate)
        [h] = ops.linear([x], [first], self.recipe, prologue=norm)
        gelu = Prologue(ops.gelu_function(self.approximate), self.recipe.nonlinear_input)
        [y] = ops.linear([plus_bias(h, first_bias)], [second], self.recipe, prologue=gelu)
        return plus_bias(y, second_bias)

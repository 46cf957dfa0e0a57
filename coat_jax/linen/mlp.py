"""Feed-forward blocks. Skins over `coat_jax.ops`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from coat_jax import ops, recipes
from coat_jax.linen.dense import Kernel
from coat_jax.ops import Recipe


class FP8SwiGLU(nn.Module):
    """y = (silu(x W_gate) * x W_up) W_down: gate and up share one FP8 input; gate, up are kept in FP8, their product is not.

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
    def __call__(self, x: jax.Array, *, norm: ops.Prologue | None = None) -> jax.Array:
        """(..., in) to (..., features); `norm` is applied to x first, inside the op that consumes it."""
        x = x if self.dtype is None else x.astype(self.dtype)
        width, out = x.shape[-1], x.shape[-1] if self.features is None else self.features
        gate, up, down = (
            Kernel(n, self.param_dtype, self.kernel_init, name=name)
            for name, n in (("gate", self.intermediate), ("up", self.intermediate), ("down", out))
        )
        gate_up = ops.linear([x], [gate(width), up(width)], self.recipe, prologue=norm)
        spec = self.recipe.nonlinear_input
        [y] = ops.linear(gate_up, [down(self.intermediate)], self.recipe, prologue=ops.Prologue(ops.gate_silu, spec))
        return y

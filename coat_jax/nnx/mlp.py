"""Feed-forward blocks. Skins over `coat_jax.ops.blocks`."""

from typing import Any

import jax
from flax import nnx

from coat_jax.nnx.parameters import given_recipe, parameters
from coat_jax.ops import Prologue, Recipe, blocks


class FP8SwiGLU(nnx.Module):
    """y = (silu(x W_gate) * x W_up) W_down; gate and up share one FP8 input, and FP8 of both is kept.

    Parameters: `gate`, `up`, `down`, each with a `kernel`, as three `flax.nnx.Linear` without bias have them.

    Args:
      in_features: width of the input.
      intermediate: width between.
      out_features: width of the result; None is the input's.
      dtype: dtype of the computation; None is the input's.
      recipe: what is quantized; None is `recipes.coat()`.
      rngs: of the initial values.
      options: `param_dtype`, `kernel_init` and `kernel_metadata` of the kernels, as in `flax.nnx.Linear`.

    Raises:
      TypeError: a recipe that is none.
    """

    def __init__(
        self,
        in_features: int,
        intermediate: int,
        out_features: int | None = None,
        *,
        dtype: Any = None,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.recipe, self.dtype = given_recipe(self, recipe), dtype
        for name, (width, out) in blocks.swiglu_shapes(intermediate, in_features, out_features).items():
            setattr(self, name, nnx.Linear(width, out, use_bias=False, rngs=rngs, **options))

    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(..., in_features) to (..., out_features); `norm` is applied to x first, inside the op that consumes it."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return blocks.swiglu_mlp(parameters(self), x, self.recipe, norm)


class FP8MLP(nnx.Module):
    """y = gelu(x W_in + b_in) W_out + b_out; FP8 of the input and of what gelu reads is kept.

    Parameters: `in` and `out`, each with `kernel` and `bias`, as two `flax.nnx.Linear` have them.

    Args:
      in_features: width of the input.
      intermediate: width between.
      out_features: width of the result; None is the input's.
      approximate: whether gelu is the tanh approximation.
      dtype: dtype of the computation; None is the input's.
      recipe: what is quantized; None is `recipes.coat()`.
      rngs: of the initial values.
      options: `use_bias`, `param_dtype`, `kernel_init`, `kernel_metadata` and so on, as in `flax.nnx.Linear`.

    Raises:
      TypeError: a recipe that is none.
    """

    def __init__(
        self,
        in_features: int,
        intermediate: int,
        out_features: int | None = None,
        *,
        approximate: bool = True,
        dtype: Any = None,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.recipe, self.dtype, self.approximate = given_recipe(self, recipe), dtype, approximate
        out = in_features if out_features is None else out_features
        for name, shape in {"in": (in_features, intermediate), "out": (intermediate, out)}.items():
            setattr(self, name, nnx.Linear(*shape, rngs=rngs, **options))

    def __call__(self, x: jax.Array, norm: Prologue | None = None) -> jax.Array:
        """(..., in_features) to (..., out_features); `norm` is applied to x first, inside the op that consumes it."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return blocks.gelu_mlp(parameters(self), x, self.recipe, norm, approximate=self.approximate)

"""A weight together with its codes: a kernel that was quantized before, so that the products that read it need not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.ops.recipe import Recipe
from coat_jax.quant import QuantizedArray, quantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedWeight:
    """A kernel and what a recipe quantizes it to. `linear` and `attention_linear` take it wherever they take a kernel.

    The products read the codes, in the forward and in the backward pass; the gradient is that of `weight`, none flows into the
    codes.

    Attributes:
      weight: the kernel, (*contracted, *features), of any float dtype.
      codes: of the kernel as a matrix, (contracted, features); from `weight_codes`. None: quantized where it is used.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> x, w, recipe = jnp.ones((2, 8)), jnp.full((8, 3), 0.5), recipes.coat()
      >>> coded = ops.CodedWeight(w, ops.weight_codes(w, recipe))
      >>> bool((ops.linear([x], [coded], recipe)[0] == ops.linear([x], [w], recipe)[0]).all())
      True
    """

    weight: jax.Array
    codes: QuantizedArray | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the kernel."""
        return self.weight.ndim

    @property
    def size(self) -> int:
        """Number of elements of the kernel."""
        return self.weight.size

    @property
    def dtype(self) -> Any:
        """Dtype of the kernel."""
        return self.weight.dtype


def as_matrix(kernel: jax.Array, size: int) -> jax.Array:
    """A kernel as the matrix that a product sees: its contracted axes, `size` elements together, and its features."""
    return kernel.reshape(size, kernel.size // max(size, 1))


def weight_codes(kernel: jax.Array, recipe: Recipe, *, axes: int = 1, amax: jax.Array | None = None) -> QuantizedArray | None:
    """What `linear` quantizes a kernel to under a recipe: codes of the matrix (contracted, features).

    Args:
      kernel: (*contracted, *features), of any float dtype.
      recipe: its `weight` says to what; None there has no codes.
      axes: number of contracted axes of the kernel.
      amax: what the kernel is scaled by instead of its own, as in `quantize`; None measures it.

    Returns:
      The codes, through which no gradient flows, or None.
    """
    if recipe.weight is None:
        return None
    size = 1
    for extent in kernel.shape[:axes]:
        size *= extent
    matrix = jax.lax.stop_gradient(as_matrix(jnp.asarray(kernel), size))
    return quantize(matrix, recipe.weight, amax=amax, implementation=recipe.implementation, called="weight_codes")


def plain_weight(kernel: Any) -> jax.Array:
    """The kernel itself, with or without codes."""
    return kernel.weight if isinstance(kernel, CodedWeight) else kernel


def codes_of(kernel: Any, size: int, recipe: Recipe) -> QuantizedArray | None:
    """The codes that come with a kernel of `size` contracted elements, or None.

    Raises:
      ValueError: codes of another spec than the recipe's, or of another shape than the kernel's.
    """
    if not isinstance(kernel, CodedWeight) or kernel.codes is None:
        return None
    if kernel.codes.spec != recipe.weight:
        raise ValueError(
            f"linear: the codes of a kernel are {kernel.codes.spec}, recipe.weight is {recipe.weight}; make the codes by "
            "weight_codes(kernel, recipe)"
        )
    matrix = (size, kernel.size // max(size, 1))
    if kernel.codes.shape != matrix:
        raise ValueError(
            f"linear: the codes of a kernel have shape {kernel.codes.shape}, its matrix is {matrix}; make the codes by "
            "weight_codes(kernel, recipe, axes=number of contracted axes)"
        )
    return kernel.codes

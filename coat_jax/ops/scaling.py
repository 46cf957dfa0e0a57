"""`Scaling`: where the amaxes of a weight product's operands come from and where they go."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from coat_jax.ops.coded_weight import CodedWeight
from coat_jax.ops.recipe import Recipe
from coat_jax.quant import Amax, QuantSpec, measured_amax, product


class Scaling(NamedTuple):
    """The amax of every operand of `linear`; see `coat_jax.quant.Amax`. What is not named is measured and stays inside.

    The amax of a gradient exists in the backward pass only. There it is written into its `jax.Ref`, which is how JAX lets a
    value leave a backward pass without posing as the gradient of something.

    Attributes:
      input: of h, what the kernels are multiplied with.
      weights: of each kernel, () for none.
      gradients: of the gradient of each result, () for none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> from coat_jax.quant import Amax
      >>> def step(w, x):
      ...     seen = jax.new_ref(jnp.zeros(()))
      ...     scaling = ops.Scaling(input=Amax(given=jnp.float32(2.0)), gradients=[Amax(out=seen)])
      ...     loss = lambda w: jnp.sum(3 * ops.linear([x], [w], recipes.coat(), scaling=scaling)[0])
      ...     return jax.grad(loss)(w), seen[...]
      >>> print(jax.jit(step)(jnp.ones((8, 4)), jnp.ones((2, 8)))[1])
      3.0
    """

    input: Amax = Amax()
    weights: Sequence[Amax] = ()
    gradients: Sequence[Amax] = ()

    def of_all(self, kernels: Sequence[Any], recipe: Recipe) -> "Scaling":
        """The same with an `Amax` for every kernel and every result.

        Raises:
          ValueError: another number of kernels; a recipe that makes groups anew along the rows; a role that the recipe does not
            quantize; an amax for a weight that comes with its codes.
        """
        if product.matches(recipe.linear_input, recipe.gradient):
            raise ValueError(
                "linear: scaling has no meaning where the weight gradient quantizes in groups along the rows, as blocks() "
                "does; use recipes.coat() or lean(), which have one scale for a tensor"
            )
        many: list[Sequence[Amax]] = []
        for name, given in (("weights", self.weights), ("gradients", self.gradients)):
            if len(given) not in (0, len(kernels)):
                raise ValueError(f"linear: scaling.{name} has {len(given)} entries for {len(kernels)} kernels")
            many.append(list(given) or [Amax()] * len(kernels))
        roles = {"linear_input": [self.input], "weight": many[0], "gradient": many[1]}
        for role, some in roles.items():
            if getattr(recipe, role) is None and any(part is not None for amax in some for part in amax):
                raise ValueError(f"linear: scaling names an amax, and recipe.{role} is None: it is not quantized")
        for kernel, amax in zip(kernels, many[0], strict=True):
            if isinstance(kernel, CodedWeight) and kernel.codes is not None and amax.given is not None:
                raise ValueError("linear: scaling gives the amax of a weight that comes with its codes; leave one of them out")
        return Scaling(self.input, *many)


def seen(amax: Amax, x: jax.Array, spec: QuantSpec | None) -> jax.Array | None:
    """The amax of x where somebody wants it."""
    return None if amax.out is None or spec is None else measured_amax(x, spec)


def write(amax: Amax, found: jax.Array | None) -> None:
    """Writes what was measured where it is wanted."""
    if amax.out is not None and found is not None:
        amax.out[...] = jax.lax.stop_gradient(found).reshape(amax.out.shape)

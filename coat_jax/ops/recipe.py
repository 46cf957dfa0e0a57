"""`Recipe`: what each role in a network is quantized to, as one static value that is passed explicitly."""

import dataclasses
from typing import Any

import jax

from coat_jax.quant import Implementation, QuantSpec

ROLES = ("linear_input", "weight", "gradient", "nonlinear_input", "attention", "layer_input")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which `QuantSpec` each role gets; None leaves the role in the dtype of the computation.

    Attributes:
      linear_input: activations as operands of weight products.
      weight: kernels as operands of weight products.
      gradient: gradients as operands of weight products.
      nonlinear_input: what is kept of the inputs of norms, activations and products of activations.
      attention: what is kept of q, k and v; the attention forward is rerun from it. None keeps what plain autodiff keeps.
      layer_input: what is kept of a layer's input under `remat="layer"`.
      recompute: keep a linear layer's non-linear inputs only and compute from them again what the product consumed, instead of
        keeping both.
      precision: of the weight products, as in `jax.lax.dot_general`; on Hopper None lets FP8 products accumulate in the
        tensor cores' 14 bits, "highest" promotes the partial sums to float32. Products of operands with a scale per 128
        promote the sum of each 128 in any case.
      implementation: who computes what there are kernels for: "xla", "pallas", "interpret", or None, which takes kernels in
        programs for a Hopper GPU where a compiled Llama-2-7B step wants no more memory and moves fewer bytes with them:
        functions element by element with their stashes and products in blocks are; norms before products and quantization by
        itself are left to XLA, which does them inside their neighbours. Attention, and products of operands with one scale
        each, are cuDNN's, cuBLASLt's and XLA's in any case.

    Raises:
      TypeError: a role that is neither a `QuantSpec` nor None.
      ValueError: an unknown implementation; later, by the ops, one that cannot run what they are given.

    Example:
      >>> from coat_jax import E4M3, PerTensor, QuantSpec, recipes
      >>> print(recipes.coat().replace(gradient=QuantSpec(E4M3, PerTensor())).gradient)
      e4m3, tensor, float32 scales
    """

    linear_input: QuantSpec | None = None
    weight: QuantSpec | None = None
    gradient: QuantSpec | None = None
    nonlinear_input: QuantSpec | None = None
    attention: QuantSpec | None = None
    layer_input: QuantSpec | None = None
    recompute: bool = False
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation | str | None = None

    def __post_init__(self):
        for role in ROLES:
            spec = getattr(self, role)
            if spec is not None and not isinstance(spec, QuantSpec):
                raise TypeError(f"Recipe: {role}={spec!r}; use a QuantSpec, or None to leave that role unquantized")
        object.__setattr__(self, "implementation", Implementation.resolve(self.implementation, "Recipe", None))

    def replace(self, **changes: Any) -> "Recipe":
        """A recipe with some fields changed.

        Raises:
          ValueError: a name that is not a field.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"Recipe.replace: {name!r} is not a field; use one of {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    @property
    def products_quantized(self) -> bool:
        """Whether any operand of a weight product is quantized."""
        return any(spec is not None for spec in (self.linear_input, self.weight, self.gradient))


def check_recipe(called: str, given: Any) -> Recipe:
    """A recipe that was given to `called`.

    Raises:
      TypeError: it is a name or something else.
    """
    if not isinstance(given, Recipe):
        raise TypeError(f"{called}: recipe={given!r} is not a Recipe; use recipes.coat(), or recipes.named('coat') for a name")
    return given

"""`convert`: the layers of a Flax model in FP8, by rules."""

from collections.abc import Sequence
from typing import Any

from flax import linen, nnx

from coat_jax.conversion import of_linen, of_nnx
from coat_jax.conversion.rules import Report, Rules, checked, unused
from coat_jax.ops import Recipe
from coat_jax.ops.recipe import check_recipe


def convert(
    model: Any, rules: Rules | None = None, *, recipe: Recipe, inputs: Sequence[Any] | None = None
) -> tuple[Any, Report]:
    """The model with its layers in FP8, and what was swapped. Parameters stay where they are, so checkpoints fit.

    Swapped are, by class, `Dense`, `DenseGeneral`, `Linear`, `LinearGeneral`, `Einsum` of NNX, `Embed`, `RMSNorm`, `LayerNorm`
    and Flax's multi-head attention; by a rule a whole SwiGLU. Functions that a model calls between its layers, such as `gelu`,
    keep what they kept.

    Args:
      model: a Linen module, or an NNX one, which is copied.
      rules: {pattern: rule} of module paths such as "blocks/0/mlp/up", "*" for any letters; the first that fits decides. A rule
        is "keep" (with all that is inside), a `Recipe`, or `SwiGLU(...)`. Modules that no pattern fits get `recipe`.
      recipe: what is quantized and kept.
      inputs: what the model is called with, arrays or `jax.ShapeDtypeStruct`s. Linen modules know their layers only when they
        are called, so they need it; for NNX it adds kept bytes to the report.

    Returns:
      The converted model and the `Report`. Of a Linen model a module with its parameters and initial values.

    Raises:
      TypeError: a model that is no Flax module; a Linen model without inputs; a rule that is none.
      ValueError: a pattern that fits no module.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import coat_jax
      >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
      >>> model, report = coat_jax.convert(model, {"layers/2": "keep"}, recipe=coat_jax.recipes.coat())
      >>> print(report)
      module    was     is
      layers/0  Linear  FP8Linear
      layers/2  Linear  left: rule "keep"
    """
    check_recipe("convert", recipe)
    every = checked(rules, recipe)
    if isinstance(model, linen.Module):
        if inputs is None:
            raise TypeError("convert: inputs=None; a Linen model has no layers before it is called, so give inputs=(x,)")
        converted, report, seen = of_linen.convert(model, every, recipe, inputs)
    elif isinstance(model, nnx.Module):
        converted, report, seen = of_nnx.convert(model, every, recipe, inputs)
    else:
        raise TypeError(f"convert: model is a {type(model).__name__}; use a flax.linen or flax.nnx module")
    if wrong := unused(rules, seen):
        raise ValueError(f"convert: rules has {wrong[0]!r}, which fits no module; the model has {', '.join(sorted(seen)[:12])}")
    return converted, report

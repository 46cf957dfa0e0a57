"""Arguments of Flax's modules under a recipe that quantizes: what becomes of them, and which have no FP8 form."""

from typing import Any

import jax

from coat_jax.ops import Recipe


def refuse(module: Any, **given: Any) -> None:
    """Raises ValueError for an argument that has a value and that the quantized form of a module cannot honour."""
    for name, value in given.items():
        if value is not None and value is not False:
            kind = type(module).__name__
            raise ValueError(f"{kind}: {name}={value!r} has no FP8 form; leave it out, or use recipe=recipes.bf16()")


def product_recipe(module: Any, default: Any = None) -> Recipe:
    """The recipe of a module with its `precision`. `default` is what its Flax namesake has where no product is given.

    Raises:
      ValueError: the module has a product of its own, which a recipe that quantizes would not use.
    """
    for name in ("dot_general", "dot_general_cls"):
        given = getattr(module, name, None)
        if given is not None and given is not default:
            kind = type(module).__name__
            raise ValueError(f"{kind}: {name}={given!r}; the recipe chooses the product, use recipes.bf16()")
    return module.recipe if module.precision is None else module.recipe.replace(precision=module.precision)


def refuse_beyond_last_axis(module: Any, ndim: int, mask: jax.Array | None) -> None:
    """Raises ValueError for an option of a norm that goes beyond its last axis, in float32 and without a mask."""
    elsewhere = {}
    for name in ("reduction_axes", "feature_axes"):
        axes = getattr(module, name)
        if axes not in (-1, ndim - 1, (-1,), (ndim - 1,)):
            elsewhere[name] = axes
    refuse(module, mask=mask, axis_name=module.axis_name, axis_index_groups=module.axis_index_groups, **elsewhere)
    if not getattr(module, "force_float32_reductions", True):
        raise ValueError(f"{type(module).__name__}: force_float32_reductions=False; FP8 norms compute in float32, leave it out")

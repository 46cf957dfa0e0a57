"""Recipes by name. A recipe is an explicit, static value; nothing about numerics is global."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from coat_jax.ops.recipe import Recipe
from coat_jax.quant import E4M3, E5M2, Format, PerBlock, PerGroup, PerTensor, QuantSpec

__all__ = ["NAMES", "Recipe", "bf16", "blocks", "coat", "lean", "named"]


def _tensor(format: Format) -> QuantSpec:
    return QuantSpec(format, PerTensor(), scale_dtype=np.dtype(jnp.bfloat16))


def _groups(size: int) -> QuantSpec:
    return QuantSpec(E4M3, PerGroup(size), scale_dtype=np.dtype(jnp.bfloat16))


def bf16() -> Recipe:
    """Nothing quantized: the modules compute what their Flax namesakes compute, bit for bit."""
    return Recipe()


def coat() -> Recipe:
    """COAT: E4M3 per tensor in weight products, E5M2 gradients, non-linear inputs kept in E4M3 groups of 16.

    q, k, v and the attention output stay in the dtype of the computation.

    Source: arXiv 2410.19313, section 5.
    """
    return Recipe(
        linear_input=_tensor(E4M3),
        weight=_tensor(E4M3),
        gradient=_tensor(E5M2),
        nonlinear_input=_groups(16),
        layer_input=_groups(128),
    )


def lean() -> Recipe:
    """COAT's products, and nothing kept that is cheap to redo: FP8 of the inputs of both norms, q, k, v, gate and up.

    Norms, activations and the attention forward are redone from these, in groups of 128; no weight product is.
    """
    return coat().replace(nonlinear_input=_groups(128), attention=_groups(128), recompute=True)


def blocks() -> Recipe:
    """What `lean` keeps, with products of E4M3 in groups of 128 (gradients too) by weights in blocks of 128 x 128.

    A large value costs precision to the 127 beside it and not to the tensor. On Hopper the products are one kernel, which
    sums blocks of 128 in float32; elsewhere plain JAX sums them one after another, which is slow. Scales are float32.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
    """
    fine = QuantSpec(E4M3, PerGroup(128))
    return lean().replace(linear_input=fine, weight=QuantSpec(E4M3, PerBlock((128, 128))), gradient=fine)


NAMES: tuple[str, ...] = ("coat", "lean", "blocks", "bf16")


def named(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
      ValueError: an unknown name.
    """
    known: dict[str, Callable[[], Recipe]] = {"coat": coat, "lean": lean, "blocks": blocks, "bf16": bf16}
    if name not in known:
        raise ValueError(f"recipe={name!r} is unknown; use one of {', '.join(NAMES)}")
    return known[name]()

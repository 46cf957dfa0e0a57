"""Declaring the parameters of linear layers apart from computing them, so that several layers can share one product."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.linen import initializers

from coat_jax.ops.recipe import check_recipe

Shape = tuple[int, ...]


def flat_init(init: Callable[..., Any], leading: int) -> Callable[..., Any]:
    """`init` of the shape with its first `leading` axes made one and the others made one, as Flax initialises kernels."""

    def run(key: jax.Array, shape: Shape, dtype: Any) -> Any:
        # A DenseGeneral of (heads, d) = (8, 64) features from 512: Flax draws (512, 512), whose fan-in is 512, and reshapes it
        # to (512, 8, 64). Drawn in the last shape, lecun_normal would count 512 x 8 as fan-in and values would be 2.8 times
        # smaller.
        flat = [math.prod(axes) for axes in (shape[:leading], shape[leading:]) if leading]
        value = init(key, tuple(flat) or (math.prod(shape),), dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
        return jnp.reshape(value, shape)

    return run


def declare(module: Any, contracted: Shape, features: Shape, batch: Shape = ()) -> tuple[jax.Array, jax.Array | None]:
    """The kernel (*batch, *contracted, *features) and bias (*batch, *features) of a Dense or DenseGeneral `module`."""
    init = flat_init(module.kernel_init, len(batch) + len(contracted))
    kernel = module.param("kernel", init, (*batch, *contracted, *features), module.param_dtype)
    if not module.use_bias:
        return kernel, None
    return kernel, module.param("bias", flat_init(module.bias_init, 0), (*batch, *features), module.param_dtype)


class WithRecipe:
    """A module with an attribute `recipe`, which has to be one.

    Raises:
      TypeError: it is a name or something else.
    """

    def __post_init__(self) -> None:
        check_recipe(type(self).__name__, getattr(self, "recipe", None))
        super().__post_init__()  # type: ignore[misc]


class Kernel(nn.Module):
    """The parameters of a Dense layer without the layer: for blocks in which several layers share one input.

    Attributes:
      features: width of the result, or its axes.
      use_bias: whether there is a bias.
      param_dtype: dtype of kernel and bias.
      kernel_init, bias_init: initializers, given flat shapes as Flax gives them.
    """

    features: int | Shape
    use_bias: bool = False
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.lecun_normal()
    bias_init: initializers.Initializer = initializers.zeros_init()

    @nn.compact
    def __call__(self, *contracted: int) -> dict[str, jax.Array]:
        """{"kernel": (*contracted, *features)}, and "bias" (*features,) where there is one, in their own dtype."""
        features = (self.features,) if isinstance(self.features, int) else tuple(self.features)
        kernel, bias = declare(self, contracted, features)
        return {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}


def declare_kernels(
    shapes: Mapping[str, tuple[int, int]], biased: Collection[str] = (), **options: Any
) -> dict[str, dict[str, jax.Array]]:
    """{name: {"kernel": (in, out)}} for shapes {name: (in, out)}, and a "bias" (out,) of those in `biased`, in the module that
    is being run."""
    return {name: Kernel(out, use_bias=name in biased, name=name, **options)(width) for name, (width, out) in shapes.items()}

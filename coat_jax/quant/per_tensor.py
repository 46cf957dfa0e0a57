"""One scale for a whole array, by kernels in two stages: the largest magnitude of every 128 elements, then scale and cast."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant import codec, rounding
from coat_jax.quant.granularity import Groups
from coat_jax.quant.implementation import group_map
from coat_jax.quant.spec import QuantSpec

WIDTH = 128


def rows(shape: Sequence[int]) -> Groups:
    """Where the kernels cut an array: along its last axis where that is made of whole rows, which a sharded array survives,
    else as one long vector."""
    shape = tuple(shape)
    if shape and shape[-1] % WIDTH == 0:
        return Groups(shape, (*[1] * (len(shape) - 1), WIDTH))
    return Groups((int(np.prod(shape)),), (WIDTH,))


def refusal(spec: QuantSpec, shape: Sequence[int]) -> str | None:
    """Why no kernel quantizes an array of this shape with one scale, or None."""
    if spec.has_exponent:
        return "has no kernel that fits one exponent to a whole array"
    return "has no kernel for an empty array" if 0 in shape else None


def encode(x: jax.Array, spec: QuantSpec, seeds: Sequence[jax.Array], *, interpret: bool) -> codec.Codes:
    """Codes of x, float32 or less, with one scale: a scalar. Reads x twice."""
    laid = rows(x.shape)
    cut = laid.split(x.reshape(laid.shape))

    def amax(x, *, axes):
        return (codec.group_amax(x.astype(jnp.float32), axes),)

    def cast(x, *, axes, scalars, numbers=None):
        noise = None if numbers is None else rounding.uniform(scalars[1], numbers())
        return (codec.encode(x.astype(jnp.float32), spec, axes, noise, amax=scalars[0]).payload,)

    [(maxima,)] = group_map(amax, [(cut,)], [laid], name="tensor_amax", interpret=interpret)
    largest = jnp.max(maxima)
    scalars = [jnp.reshape(s, 1) for s in (largest, *seeds)]
    run = functools.partial(group_map, numbered=bool(seeds), interpret=interpret)
    [(payload,)] = run(cast, [(cut,)], [laid], name="tensor_cast", scalars=scalars)
    scale = codec.scale_of(largest, spec).astype(spec.scale_dtype)
    return codec.Codes(laid.merge(payload).reshape(x.shape), scale, None)


def decode(codes: codec.Codes, spec: QuantSpec, dtype: np.dtype, *, interpret: bool) -> jax.Array:
    """What codes with one scale stand for."""
    laid = rows(codes.payload.shape)

    def values(payload, *, axes, scalars):
        scale = jnp.broadcast_to(scalars[0], codec.statistic_shape(payload.shape, axes))
        return (codec.decode(codec.Codes(payload, scale, None), spec, axes).astype(dtype),)

    cut = laid.split(codes.payload.reshape(laid.shape))
    scalars = [codes.scale.astype(jnp.float32).reshape(1)]
    [(x,)] = group_map(values, [(cut,)], [laid], name="tensor_dequantize", scalars=scalars, interpret=interpret)
    return laid.merge(x).reshape(codes.payload.shape)

"""`quantize` and `dequantize`: arrays to quantized arrays and back, and the choice of who computes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant import codec, rounding
from coat_jax.quant import per_tensor as tensor
from coat_jax.quant.array import QuantizedArray
from coat_jax.quant.formats import TINY
from coat_jax.quant.granularity import Groups, PerTensor
from coat_jax.quant.implementation import Implementation, Operation, choose, group_map, refusal
from coat_jax.quant.rounding import Rounding
from coat_jax.quant.spec import QuantSpec


def split_codes(q: QuantizedArray) -> tuple[codec.Codes, Groups]:
    """The stored codes of q laid out by groups, as the group math sees them, and the groups."""
    groups = Groups.of(q.spec.granularity, q.payload.shape)
    statistics = codec.statistic_shape(groups.split_shape, groups.axes)
    exponent = None if q.exponent is None else q.exponent.reshape(statistics)
    return codec.Codes(groups.split(q.payload), q.scale.reshape(statistics), exponent), groups


def merge_codes(codes: codec.Codes, groups: Groups, spec: QuantSpec, dtype: np.dtype) -> QuantizedArray:
    """The inverse of `split_codes`: codes laid out by groups as a quantized array of `dtype`."""
    shape = groups.scale_shape
    exponent = None if codes.exponent is None else codes.exponent.reshape(shape)
    return QuantizedArray(groups.merge(codes.payload), codes.scale.reshape(shape), exponent, spec, dtype)


def quantize(
    x: jax.Array,
    spec: QuantSpec,
    *,
    seed: jax.Array | int | None = None,
    amax: jax.Array | None = None,
    implementation: Implementation | str | None = None,
    called: str | None = None,
) -> QuantizedArray:
    """Quantizes an array: payload = cast(x / scale), or cast(sign(x) f(|x| / amax)) with an expansion f.

    Args:
      x: floating-point array of any shape. A NaN or an inf makes its group NaN; magnitudes under 2^-126 count as zero.
      spec: format, granularity, expansion and rounding.
      seed: uint32, for stochastic rounding: the same seed gives the same codes on any sharding.
      amax: float32 of the scales' shape, or a scalar for one scale: the largest magnitude that each group is scaled by, instead
        of its own, so that x is read once. Larger elements saturate. None measures it. Plain JAX only.
      implementation: "xla", "pallas", "interpret", or None to let the library choose: XLA, which fuses it with its neighbours.
      called: the function that quantizes, for messages about the implementation; None is this one.

    Returns:
      A `QuantizedArray` of x's shape and dtype.

    Raises:
      TypeError: x is not floating point.
      ValueError: the granularity does not fit x's shape, stochastic rounding without a seed, an amax of another shape, or a
        kernel by name with an amax.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import E4M3, PerGroup, QuantSpec, dequantize, quantize
      >>> q = quantize(jnp.array([0.0, 1.0, -3.0, 448.0]), QuantSpec(E4M3, PerGroup(4)))
      >>> dequantize(q)
      Array([  0.,   1.,  -3., 448.], dtype=float32)
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize: x has dtype {x.dtype}; only floating-point arrays are quantized, cast it first")
    groups = Groups.of(spec.granularity, x.shape)
    stochastic = spec.rounding is Rounding.STOCHASTIC
    if stochastic and seed is None:
        raise ValueError("quantize: the spec rounds stochastically and seed is None; give a uint32 seed, new for every call")

    given = None if amax is None else _amax_of_groups(amax, groups)

    def encode(x, *, axes, numbers=None, scalars=(None,)):
        noise = None if numbers is None else rounding.uniform(scalars[0], numbers())
        return tuple(part for part in codec.encode(x.astype(jnp.float32), spec, axes, noise, amax=given) if part is not None)

    def plain(x, *seeds):
        numbers = lambda: groups.split(rounding.element_index(groups.shape))  # noqa: E731
        return encode(x, axes=groups.axes, numbers=numbers if seeds else None, scalars=seeds)

    def kernel(x, *seeds, interpret):
        if isinstance(spec.granularity, PerTensor):
            codes = tensor.encode(x.reshape(groups.shape), spec, seeds, interpret=interpret)
            return groups.split(codes.payload), codes.scale.reshape(codec.statistic_shape(groups.split_shape, groups.axes))
        scalars = [jnp.reshape(seed, 1) for seed in seeds]
        options = {"name": "quantize", "numbered": stochastic, "interpret": interpret}
        return group_map(encode, [(x,)], [groups], scalars=scalars, **options)[0]

    seeds = (jnp.asarray(seed, jnp.uint32),) if stochastic else ()
    parts = choose(
        kernel,
        plain,
        groups.split(x),
        *seeds,
        operation=Operation.QUANTIZE,
        implementation=implementation,
        called=called,
        refused=_refusal(spec, groups, blocks=not stochastic) if given is None else "has no kernel that is given the amax",
    )
    codes = codec.Codes(*parts, *[None] * (3 - len(parts)))
    return merge_codes(codes, groups, spec, x.dtype)


def dequantize(
    q: QuantizedArray, dtype: np.dtype | None = None, *, implementation: Implementation | str | None = None
) -> jax.Array:
    """The array that q stands for: payload * scale, or sign(payload) f^-1(|payload|) * scale with an expansion f.

    Args:
      q: a quantized array.
      dtype: dtype of the result; None is the dtype that was quantized.
      implementation: as in `quantize`.

    Returns:
      An array of q's shape. Computed in float32 and cast once.
    """
    codes, groups = split_codes(q)
    dtype = q.dtype if dtype is None else dtype

    def decode(payload, scale, exponent=None, *, axes):
        return (codec.decode(codec.Codes(payload, scale, exponent), q.spec, axes).astype(dtype),)

    def kernel(*parts, interpret):
        if isinstance(q.spec.granularity, PerTensor):
            codes = codec.Codes(parts[0].reshape(groups.shape), parts[1], None)
            return (groups.split(tensor.decode(codes, q.spec, dtype, interpret=interpret)),)
        return group_map(decode, [parts], [groups], name="dequantize", interpret=interpret)[0]

    [x] = choose(
        kernel,
        lambda *parts: decode(*parts, axes=groups.axes),
        *(part for part in codes if part is not None),
        operation=Operation.DEQUANTIZE,
        implementation=implementation,
        refused=_refusal(dataclasses.replace(q.spec, rounding=Rounding.NEAREST), groups, blocks=False),
    )
    return groups.merge(x)


def _amax_of_groups(amax: jax.Array, groups: Groups) -> jax.Array:
    """A given amax as the group math takes it, as `codec.group_amax` would measure it: at least the smallest normal number.

    Raises:
      ValueError: another shape than the scales'.
    """
    amax = jnp.asarray(amax, jnp.float32)
    one = all(n == 1 for n in groups.scale_shape)
    if amax.shape != groups.scale_shape and not (one and amax.shape == ()):
        raise ValueError(f"quantize: amax has shape {amax.shape}; the scales have {groups.scale_shape}")
    return jnp.maximum(amax, TINY).reshape(codec.statistic_shape(groups.split_shape, groups.axes))


def _refusal(spec: QuantSpec, groups: Groups, *, blocks: bool) -> str | None:
    """Why no kernel quantizes by this spec, or None."""
    if isinstance(spec.granularity, PerTensor):
        return tensor.refusal(spec, groups.shape)
    if spec.rounding is Rounding.STOCHASTIC and groups.ragged:
        return "has no kernel that rounds the groups of a ragged array stochastically"
    return refusal(groups, blocks=blocks)

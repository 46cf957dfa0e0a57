"""Ours against the oracle: specs under test, and the one comparison with its derived bounds.

Bounds. u = 2^-24 is float32's unit roundoff; log2 and exp2 are taken to be right within 4 ulp, 8 u relative. By first-order
propagation the code-domain magnitude y that float32 arithmetic reaches is off by at most

    power      y u (2 k + 11 |p| ln 2 + 10)      y = max 2^p, p = k log2 r: the 2 u of r (a reciprocal, a product) grow by k;
                                                 8 u of log2, the roundings of the product and of exp2's argument make
                                                 11 u |p| absolute in p, ln 2 times that relative in y
    log        (max - 1) u (3 / L + 12) + y u    2 u of r are 3 u absolute in log2 r; |log2 r| <= L after clipping
    softsign   7 u y                             seven roundings
    none       0                                 the oracle rounds the product to float32 as well

so codes may differ from the oracle's, and then by one, only where y lies that close to a rounding boundary.
"""

import functools

import jax
import numpy as np
import oracle

from coat_jax.quant import (
    E4M3,
    E5M2,
    INT8,
    UINT8,
    LogRange,
    PerBlock,
    PerGroup,
    PerTensor,
    PowerExpansion,
    QuantizedArray,
    QuantSpec,
    Softsign,
    dequantize,
    quantize,
)

U = 2.0**-24
EXPANSIONS = {PowerExpansion: "power", LogRange: "log", Softsign: "softsign", type(None): None}

PLAIN = {
    "e4m3": QuantSpec(E4M3, PerGroup(128)),
    "e5m2": QuantSpec(E5M2, PerGroup(128)),
    "int8": QuantSpec(INT8, PerGroup(128)),
    "e4m3 per tensor": QuantSpec(E4M3, PerTensor()),
    "e5m2 per tensor": QuantSpec(E5M2, PerTensor()),
    "e4m3 groups of 16, bf16 scales": QuantSpec(E4M3, PerGroup(16), scale_dtype=jax.numpy.bfloat16),
}
EXPANDED = {
    "e4m3 power": QuantSpec(E4M3, PerGroup(128), PowerExpansion()),
    "e5m2 power": QuantSpec(E5M2, PerGroup(128), PowerExpansion()),
    "e4m3 power per tensor": QuantSpec(E4M3, PerTensor(), PowerExpansion()),
    "e4m3 power, bf16 scales": QuantSpec(E4M3, PerGroup(128), PowerExpansion(), scale_dtype=jax.numpy.bfloat16),
    "e4m3 power, kept": QuantSpec(E4M3, PerGroup(128), PowerExpansion(), keep_nonzero=True),
    "uint8 log": QuantSpec(UINT8, PerGroup(128), LogRange()),
    "int8 softsign": QuantSpec(INT8, PerGroup(128), Softsign()),
}
SPECS = PLAIN | EXPANDED

SHAPE = (255, 256)
"""One shape for most tests, so that each spec is compiled once: as many elements as there are finite bf16 numbers."""

jit_quantize = jax.jit(quantize, static_argnames="spec")
jit_dequantize = jax.jit(dequantize, static_argnames="dtype")


def embed(values) -> np.ndarray:
    """A float32 array of SHAPE that begins with `values` (a row, or rows), zeros elsewhere."""
    x, values = np.zeros(SHAPE, np.float32), np.atleast_2d(np.asarray(values, np.float32))
    x[: values.shape[0], : values.shape[1]] = values
    return x


def tile_of(granularity, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Extent of one group, from the granularity's fields alone."""
    if isinstance(granularity, PerTensor):
        return shape
    tile = [1] * len(shape)
    if isinstance(granularity, PerGroup) and shape:
        tile[granularity.axis] = granularity.size
    if isinstance(granularity, PerBlock):
        tile[len(shape) - len(granularity.block) :] = granularity.block
    return tuple(tile)


def payload_bytes(q: QuantizedArray) -> np.ndarray:
    """The stored bytes."""
    return np.asarray(q.payload).view(np.uint8)


def same_bits(a: QuantizedArray, b: QuantizedArray) -> bool:
    """Whether payload, scale and exponent are bit for bit the same."""
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def slack(want: oracle.Encoded, spec: QuantSpec) -> np.ndarray:
    """How far float32 arithmetic may move each y (module docstring)."""
    top, y = spec.format.max, want.y
    if spec.expansion is None:
        return np.zeros_like(y)
    if isinstance(spec.expansion, Softsign):
        return 7 * U * y
    exponent = np.zeros_like(y)
    for index, where in oracle.tiles(y.shape, tile_of(spec.granularity, y.shape)).items():
        exponent[where] = want.exponent[index]
    if isinstance(spec.expansion, LogRange):
        return (top - 1) * U * (3 / (exponent / 4) + 12) + U * y
    p = np.abs(np.log2(np.where(y > 0, y, top) / top))
    return y * U * (exponent / 8 + 11 * p * np.log(2) + 10)


def check_exponents(got: np.ndarray, want: oracle.Encoded, spec: QuantSpec) -> None:
    """Equal, or one apart where the value before rounding is a whole number within 20 u and 1.5 u over the octaves."""
    if EXPANSIONS[type(spec.expansion)] == "power":
        octaves = 16 * np.log2(spec.expansion.target) / want.exact_exponent
    else:
        octaves = want.exact_exponent / 4
    reach = np.minimum(want.exact_exponent, 256) * U * (20 + 1.5 / np.maximum(octaves, 1e-3))
    near = np.abs(want.exact_exponent - np.round(np.minimum(want.exact_exponent, 1e6))) <= reach
    difference = np.abs(got.astype(int) - want.exponent)
    assert np.all(difference <= near), (got[difference > near], want.exact_exponent[difference > near])


def check(x: np.ndarray, spec: QuantSpec) -> QuantizedArray:
    """Quantizes x, asks the oracle, and compares payload bytes, scales, exponents and the decoded values."""
    q = jit_quantize(x, spec)
    x = np.asarray(x).astype(np.float64)
    name, kind, tile = spec.format.name, EXPANSIONS[type(spec.expansion)], tile_of(spec.granularity, x.shape)
    ask = functools.partial(
        oracle.encode, x, name, tile, kind, bf16_scales=spec.scale_dtype.itemsize == 2, keep_nonzero=spec.keep_nonzero
    )
    want = ask()
    np.testing.assert_array_equal(np.asarray(q.scale, np.float32), want.scale)
    if spec.has_exponent:
        check_exponents(np.asarray(q.exponent), want, spec)
        want = ask(exponents=np.asarray(q.exponent))
    allowed = oracle.boundary_distance(want.y, name) <= slack(want, spec) if spec.expansion is not None else np.zeros(x.shape)
    position = np.abs(np.asarray(q.payload).astype(np.float32))
    difference = np.abs(np.searchsorted(oracle.magnitudes(name), position) - want.code)
    assert np.all(difference <= allowed), (x[difference > allowed], want.y[difference > allowed])
    exact = difference == 0
    np.testing.assert_array_equal(payload_bytes(q)[exact], want.payload(name)[exact])
    assert np.mean(allowed) <= 0.01, "the bounds forgive too many elements to mean anything"
    check_decode(q)
    return q


def check_decode(q: QuantizedArray) -> None:
    """Decoded values: the float32 nearest to payload * scale; with an expansion, within the bound of its inverse.

    Relative errors: power 2^p', p' = log2(y / max) / k, has u (2 / k + 11 |p'| ln 2 + 10): u of y / max and of its reciprocal
    grow by 1 / k; 8 u of log2 and three roundings are relative in p'; 10 u are exp2's and the last product's. log and softsign
    have fewer operations. Below the smallest normal float32 lies 0 without an expansion, and with one that number itself.
    """
    spec, name, kind = q.spec, q.spec.format.name, EXPANSIONS[type(q.spec.expansion)]
    payload = np.asarray(q.payload).astype(np.float64)
    tile = tile_of(spec.granularity, payload.shape)
    exponent = None if q.exponent is None else np.asarray(q.exponent)
    want = oracle.decode(np.abs(payload), payload < 0, np.asarray(q.scale, np.float64), exponent, tile, name, kind)
    unit = oracle.decode(np.abs(payload), payload < 0, np.ones(q.scale.shape), exponent, tile, name, kind)
    got = np.asarray(jit_dequantize(q, dtype=np.dtype(np.float32)), np.float64)
    assert np.all(got[payload == 0] == 0)
    if kind is None:
        normal = np.abs(want) >= oracle.TINY
        np.testing.assert_array_equal(got[normal], want[normal].astype(np.float32))
        assert np.all(np.abs(got[~normal]) < oracle.TINY)
        return
    live = (np.abs(want) >= oracle.TINY) & (np.abs(unit) >= 2 * oracle.TINY)
    p = np.abs(np.log2(np.abs(unit[live])))
    per_group = np.zeros(payload.shape)
    for index, where in oracle.tiles(payload.shape, tile).items():
        per_group[where] = 16 / exponent[index] if kind == "power" else 1.0
    bound = U * (2 * per_group[live] + 11 * p * np.log(2) + 10)
    assert np.all(np.abs(got[live] / want[live] - 1) <= bound), np.max(np.abs(got[live] / want[live] - 1) / bound)
    faint = (payload != 0) & ~live
    assert np.all(np.abs(got[faint]) >= oracle.TINY) and np.all(np.sign(got[faint]) == np.sign(payload[faint]))

"""Formats: every code, every boundary, saturation, neighbours."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from agreement import U

from coat_jax.quant import E4M3, E5M2, INT8, UINT8, PerGroup, QuantizedArray, QuantSpec, dequantize

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "int8": INT8, "uint8": UINT8}
ALL_BF16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_all_256_codes_decode_exactly(name):
    codes = np.arange(256, dtype=np.uint8)
    payload = jnp.asarray(codes.view(FORMATS[name].dtype))
    q = QuantizedArray(payload, jnp.ones((1,)), None, QuantSpec(FORMATS[name], PerGroup(256)), jnp.float32)
    want = np.array([oracle.value(name, int(code)) for code in codes])
    got = np.asarray(dequantize(q))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize("name", FORMATS)
def test_constants_are_the_table_s(name):
    table = oracle.magnitudes(name)
    assert FORMATS[name].max == table[-1] == oracle.LARGEST[name]
    assert FORMATS[name].tiny == table[1]
    assert FORMATS[name].signed == (name != "uint8")


@pytest.mark.parametrize("name", FORMATS)
def test_cast_of_all_bf16_is_nearest_even_and_saturates(name):
    finite = ALL_BF16[np.isfinite(ALL_BF16) & ((np.abs(ALL_BF16) >= oracle.TINY) | (ALL_BF16 == 0))]
    codes = np.asarray(jax.jit(FORMATS[name].cast)(finite)).astype(np.float64)
    want = oracle.magnitudes(name)[oracle.nearest(np.abs(finite).astype(np.float64), name)]
    sign = np.sign(finite) if name != "uint8" else finite > 0
    np.testing.assert_array_equal(codes, sign * want)


@pytest.mark.parametrize("name", FORMATS)
def test_cast_at_every_boundary(name):
    """Half way goes to the even code, one float32 ulp beside it to the nearer one."""
    table = oracle.magnitudes(name)
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    for y in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))):
        want = table[oracle.nearest(y.astype(np.float64), name)]
        np.testing.assert_array_equal(np.asarray(FORMATS[name].cast(jnp.asarray(y))).astype(np.float64), want)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_cast_saturates_infinities_and_keeps_nan(name):
    y = jnp.tile(jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0]), 64)
    for cast in (FORMATS[name].cast, jax.jit(FORMATS[name].cast)):
        want = [oracle.LARGEST[name], -oracle.LARGEST[name], np.nan, 1.0]
        np.testing.assert_array_equal(np.asarray(cast(y)).astype(np.float32), np.tile(want, 64))


@pytest.mark.parametrize("name", FORMATS)
def test_neighbours_are_the_magnitudes_below_and_above(name):
    table = oracle.magnitudes(name)
    between = np.exp2(np.random.default_rng(0).uniform(-20, np.log2(table[-1]), 5000)).astype(np.float32)
    y = np.concatenate([table.astype(np.float32), between])
    lower, upper = map(np.asarray, jax.jit(FORMATS[name].neighbours)(y))
    below = np.searchsorted(table, y, side="right") - 1
    np.testing.assert_array_equal(lower, table[below])
    np.testing.assert_array_equal(upper, table[np.minimum(below + 1, len(table) - 1)])


def test_the_oracle_agrees_with_ml_dtypes():
    """Two independent descriptions of the formats: bit definitions here, the reference casts there."""
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        codes = np.arange(256, dtype=np.uint8)
        np.testing.assert_array_equal(codes.view(dtype).astype(np.float64), [oracle.value(name, int(code)) for code in codes])
        y = np.random.default_rng(1).uniform(0, oracle.LARGEST[name] * (1 - U), 20_000)
        np.testing.assert_array_equal(
            y.astype(np.float32).astype(dtype).view(np.uint8), oracle.nearest(y.astype(np.float32), name)
        )

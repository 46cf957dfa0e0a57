"""Where 8-bit codecs break: odd shapes, zeros, lone elements, the ends of float32, inf and NaN."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from agreement import EXPANDED, SHAPE, SPECS, check, embed, jit_dequantize, jit_quantize, payload_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coat_jax.quant import E4M3, PerBlock, PerGroup, PerTensor, PowerExpansion, QuantSpec, quantize

SIGNED = [name for name, spec in SPECS.items() if spec.format.signed]
SHAPES = [
    ((5, 300), PerGroup(128)),  # ragged last group
    ((7,), PerGroup(16)),
    ((3, 7), PerGroup(1)),
    ((1003,), PerGroup(128)),
    ((300, 5), PerGroup(128, axis=-2)),
    ((2, 37, 3), PerGroup(16, axis=-2)),
    ((4, 3, 2), PerGroup(3, axis=-3)),
    ((130, 257), PerBlock((128, 128))),  # ragged on both edges
    ((2, 5, 7), PerBlock((2, 3))),
    ((6, 9), PerBlock((4,))),
    ((2, 5, 7), PerTensor()),
    ((), PerTensor()),
    ((), PerGroup(4)),
    ((1, 1), PerGroup(128)),
    ((0,), PerTensor()),
    ((0,), PerGroup(4)),
    ((0, 3), PerGroup(4)),
    ((3, 0), PerGroup(4)),
    ((3, 0), PerBlock((2, 2))),
    ((3, 0), PerTensor()),
]


@pytest.mark.parametrize("expansion", [None, PowerExpansion()], ids=["plain", "power"])
@pytest.mark.parametrize("shape, granularity", SHAPES, ids=str)
def test_shapes(shape, granularity, expansion):
    spec = QuantSpec(E4M3, granularity, expansion)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q = check(x, spec) if x.size else quantize(x, spec)
    assert q.shape == q.payload.shape == shape
    assert len(q.scale.shape) == len(shape)
    assert jit_dequantize(q).shape == shape


@pytest.mark.parametrize("name", SPECS)
def test_zeros_are_code_zero_and_decode_to_zero(name):
    q = jit_quantize(np.zeros(SHAPE, np.float32), SPECS[name])
    assert not payload_bytes(q).any()
    np.testing.assert_array_equal(np.asarray(q.scale, np.float32), np.float32(oracle.TINY))
    assert not np.asarray(jit_dequantize(q)).any()


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("magnitude", [1.2e-38, 1e-30, 1e-8, 1.0, 3.0, 1e30, 8e37])
def test_constant_groups_and_lone_elements_keep_value_and_sign(name, magnitude):
    """amax takes the top code, so what decodes is amax up to the rounding of the scale: 2^-8 in bf16, a few u in float32.

    Without an expansion, below 2^-126 max the scale is at its floor and the code is rounded like any other: 2^-4 for E4M3,
    2^-3 for E5M2, half a unit of 1/127 for INT8, and what decodes below 2^-126 may be flushed to 0.
    """
    spec = SPECS[name]
    constant = np.full(SHAPE, magnitude, np.float32)
    constant[:, ::3] *= -1
    lone = np.zeros(SHAPE, np.float32)
    lone[:3, 77] = -magnitude
    for x in (constant, lone):
        got = np.asarray(jit_dequantize(jit_quantize(x, spec)))
        if spec.expansion is None and magnitude < 1e-35:
            assert np.all(np.abs(got - x) <= np.maximum(np.abs(x) * 2.0**-3, oracle.TINY))
        else:
            np.testing.assert_allclose(got, x, rtol=2.0**-8 if spec.scale_dtype.itemsize == 2 else 2e-6)


@pytest.mark.parametrize("name", EXPANDED)
def test_the_ends_of_float32_stay_finite(name):
    """One group from 1e-38 to 3e38. With an expansion what is over 2^126 decodes to 2^126 and nothing becomes inf or NaN."""
    x = embed([1.2e-38, 1e-30, 1e-20, 1e-8, 1.0, 1e8, 1e20, 1e30, 3e38, 0.0])
    got = np.asarray(jit_dequantize(jit_quantize(x, SPECS[name])))
    assert np.isfinite(got).all()
    assert got[0, 8] == np.float32(1 / oracle.TINY)
    assert got[0, 9] == 0


@pytest.mark.parametrize("name", [name for name in SPECS if name not in EXPANDED])
def test_three_e38_survives_plain_scaling(name):
    x = embed([3e38, -3e38])
    np.testing.assert_allclose(np.asarray(jit_dequantize(jit_quantize(x, SPECS[name]))), x, rtol=2.0**-8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SPECS)
def test_a_bad_element_makes_its_group_nan_and_no_other(name, bad):
    x = np.abs(np.random.default_rng(1).normal(size=SHAPE)).astype(np.float32) + np.float32(0.1)
    x[3] = 0.0
    clean = jit_dequantize(jit_quantize(x, SPECS[name]))
    x[1, 130] = x[3, 5] = bad
    got = np.asarray(jit_dequantize(jit_quantize(x, SPECS[name])))
    hit = np.zeros(x.shape, bool)
    size = getattr(SPECS[name].granularity, "size", None)
    if size is None:
        hit[:] = True
    else:
        for row, column in ((1, 130), (3, 5)):
            hit[row, column // size * size : (column // size + 1) * size] = True
    assert np.isnan(got[hit]).all()
    np.testing.assert_array_equal(got[~hit], np.asarray(clean)[~hit])


@pytest.mark.parametrize("name", EXPANDED)
def test_keep_nonzero_never_flushes(name):
    """Non-zero elements keep a non-zero code and a non-zero value however wide the group; zeros stay zeros."""
    spec = SPECS[name]
    spec = QuantSpec(spec.format, spec.granularity, spec.expansion, scale_dtype=spec.scale_dtype, keep_nonzero=True)
    x = np.exp2(np.random.default_rng(2).uniform(-126, 126, SHAPE)).astype(np.float32)
    x[:, ::5] = 0
    q = jit_quantize(x, spec)
    got = np.asarray(jit_dequantize(q))
    np.testing.assert_array_equal(np.asarray(q.payload).astype(np.float32) > 0, x > 0)
    np.testing.assert_array_equal(got > 0, x > 0)


def test_subnormals_count_as_zero():
    x = embed([1e-39, -1e-40, 1e-45, 0.0, -0.0])
    for name in SIGNED:
        assert not payload_bytes(jit_quantize(x, SPECS[name])).any(), name


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(SIGNED),
    x=hnp.arrays(np.float32, (3, 40), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)),
)
def test_any_values(name, x):
    """Ordered values get ordered codes, no value leaves its group's range, and quantizing what was decoded changes nothing."""
    x = embed(x)
    q = jit_quantize(x, SPECS[name])
    y = np.asarray(jit_dequantize(q))
    codes = np.asarray(q.payload).astype(np.float32)
    for row in range(3) if getattr(SPECS[name].granularity, "size", 40) >= 40 else ():
        order = np.argsort(x[row, :40], kind="stable")
        assert np.all(np.diff(codes[row][order]) >= 0)
    assert np.all(np.abs(y) <= np.maximum(np.abs(x).max() * np.float32(1 + 2.0**-7), oracle.TINY))
    assert np.all((y == 0) | (np.sign(y) == np.sign(x)))
    if SPECS[name].expansion is None and np.abs(x).max(initial=0) > 1e-30:
        np.testing.assert_array_equal(
            np.asarray(jit_dequantize(jit_quantize(y, SPECS[name]))).astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        )

"""Every finite bf16 number through every kind of spec, against the oracle: payload bytes, scales, exponents, decoded values."""

import ml_dtypes
import numpy as np
import pytest
from agreement import EXPANDED, SHAPE, SPECS, check, jit_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

EVERY = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE = EVERY[np.isfinite(EVERY.astype(np.float32))]
ORDERS = {
    "neighbours": FINITE,  # a group is one binade
    "mixed": FINITE[np.random.default_rng(0).permutation(FINITE.size)],  # a group spans the range of bf16
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SPECS)
def test_all_bf16(name, order):
    spec, x = SPECS[name], ORDERS[order]
    if spec.format.name == "uint8":
        x = np.abs(x)
    check(x.reshape(SHAPE), spec)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("name", EXPANDED)
def test_moments_like_values(name, sigma):
    """What optimizers hold: normal numbers times lognormal(sigma) scales."""
    rng = np.random.default_rng(3)
    x = 1e-5 * rng.normal(size=SHAPE) * np.exp(sigma * rng.normal(size=SHAPE))
    check((np.abs(x) if SPECS[name].format.name == "uint8" else x).astype(np.float32), SPECS[name])


@pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].format.signed])
def test_signs_survive(name):
    """The code of -x is the code of x with its sign turned: magnitudes never depend on signs."""
    x = np.random.default_rng(4).normal(size=SHAPE).astype(np.float32)
    plus, minus = jit_quantize(x, SPECS[name]), jit_quantize(-x, SPECS[name])
    np.testing.assert_array_equal(np.asarray(plus.payload).astype(np.float32), -np.asarray(minus.payload).astype(np.float32))
    np.testing.assert_array_equal(plus.scale, minus.scale)
    assert np.all(np.sign(np.asarray(plus.payload).astype(np.float32)) * np.sign(x) >= 0)


@settings(max_examples=15, deadline=None)
@given(power=st.integers(-60, 60), name=st.sampled_from(sorted(SPECS)))
def test_a_power_of_two_moves_only_the_scale(power, name):
    x = np.abs(np.random.default_rng(5).normal(size=SHAPE)).astype(np.float32) + np.float32(1e-3)
    one, moved = jit_quantize(x, SPECS[name]), jit_quantize(x * np.float32(2.0**power), SPECS[name])
    np.testing.assert_array_equal(np.asarray(one.payload).view(np.uint8), np.asarray(moved.payload).view(np.uint8))
    np.testing.assert_array_equal(
        np.asarray(one.scale, np.float32) * np.float32(2.0**power), np.asarray(moved.scale, np.float32)
    )
    if one.exponent is not None:
        np.testing.assert_array_equal(one.exponent, moved.exponent)

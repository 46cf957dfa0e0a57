"""The block-scaled product: interpreted, plain JAX's bytes where sums are exact; within the bound of float32 sums elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_group_map import interpreted, numbers_like, same_bytes

from coat_jax.quant import E4M3, E5M2, PerBlock, PerGroup, QuantizedArray, QuantSpec, quantize, scaled_product

GROUPS = QuantSpec(E4M3, PerGroup(128))
BLOCKS = QuantSpec(E4M3, PerBlock((128, 128)))


def whole(shape, spec, seed):
    """Payloads that are whole numbers up to 15 in magnitude, so that a block's sum is below 2^24: exact in any order."""
    rng = np.random.default_rng(seed)
    like = jax.eval_shape(lambda x: quantize(x, spec), jax.ShapeDtypeStruct(shape, jnp.float32))
    payload = rng.integers(-15, 16, shape).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, like.scale.shape).astype(np.float32)
    return QuantizedArray(jnp.asarray(payload).astype(spec.format.dtype), jnp.asarray(scale), None, spec, jnp.float32)


def products(a, b, dtype=None):
    return [jax.jit(lambda a, b, i=i: scaled_product(a, b, dtype, implementation=i))(a, b) for i in ("interpret", "xla")]


@interpreted
@pytest.mark.parametrize("right", [GROUPS, BLOCKS], ids=str)
@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate]
)  # without shrinking, which would take minutes
@given(m=st.integers(1, 300), n=st.integers(1, 300), k=st.integers(1, 600))
def test_interpreted_bytes_are_those_of_plain_jax(right, m, n, k):
    """Every shape, ragged ones included; the interpreter's detector raises where copies and reads race."""
    same_bytes(*products(whole((m, k), GROUPS, m), whole((n, k), right, n)))


@interpreted
def test_more_tiles_than_programs_and_more_blocks_than_stages():
    same_bytes(*products(whole((512, 1024), GROUPS, 0), whole((264, 1024), BLOCKS, 1), jnp.bfloat16))


def exact(a, b):
    """The product in float64, and the same sum of magnitudes."""
    a, b = (
        np.asarray(q.payload, np.float64)
        * np.kron(np.asarray(q.scale, np.float64), np.ones((1 if q.scale.shape[0] == q.shape[0] else 128, 128)))[
            : q.shape[0], : q.shape[1]
        ]
        for q in (a, b)
    )
    return a @ b.T, np.abs(a) @ np.abs(b).T


@interpreted
@pytest.mark.parametrize("right", [GROUPS, BLOCKS, QuantSpec(E5M2, PerGroup(128))], ids=str)
def test_both_are_within_the_bound_of_float32_sums(right):
    """Products of two FP8 numbers are exact in float32. What is rounded, each time by at most 2^-24: 127 additions in a block,
    the product of the scales, that with the block's sum, and an addition per block."""
    a, b = quantize(numbers_like((136, 300)), GROUPS), quantize(numbers_like((200, 300), 1), right)
    want, magnitude = exact(a, b)
    for got in products(a, b):
        assert np.all(np.abs(np.asarray(got, np.float64) - want) <= (127 + 2 + 3) * 2.0**-24 * magnitude * 1.001)


@interpreted
def test_zeros_give_zeros_and_a_nan_stays_in_its_row_or_column():
    x, w = numbers_like((136, 256)).at[5, 7].set(jnp.nan).at[9].set(0.0), numbers_like((256, 256), 1).at[200, 3].set(jnp.nan)
    poisoned = np.zeros((136, 256), bool)
    poisoned[5], poisoned[:, 128:] = True, True
    for right in (GROUPS, BLOCKS):
        got, plain = products(quantize(x, GROUPS), quantize(w, right))
        where = poisoned if right is BLOCKS else poisoned & ((np.arange(256) == 200) | (np.arange(136) == 5)[:, None])
        for y in (got, plain):
            np.testing.assert_array_equal(np.isnan(y), where)
            assert np.all(np.asarray(y)[9][~where[9]] == 0)


def test_what_does_not_contract_is_refused():
    a, b = whole((8, 256), GROUPS, 0), whole((8, 256), BLOCKS, 1)
    with pytest.raises(ValueError, match=r"give \(m, k\) and \(n, k\)"):
        scaled_product(a, whole((8, 128), BLOCKS, 1))
    with pytest.raises(ValueError, match="groups of 128 along the last axis"):
        scaled_product(b, a)
    with pytest.raises(ValueError, match="no kernel for an empty array"):
        scaled_product(whole((0, 256), GROUPS, 0), b, implementation="pallas")

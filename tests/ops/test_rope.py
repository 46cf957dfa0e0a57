"""Scaled rotary frequencies against their equation in NumPy float64, piece by piece."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops.rope import frequencies

LLAMA_31, LLAMA_32 = ops.Llama3Scaling(8.0, 1.0, 4.0, 8192), ops.Llama3Scaling(32.0, 1.0, 4.0, 8192)


def oracle(dim, theta, scaling):
    """One frequency after another, with a branch for each regime."""
    made = []
    for i in range(dim // 2):
        f = theta ** (-2 * i / dim)
        wave = 2 * math.pi / f
        if wave > scaling.original_max_position_embeddings / scaling.low_freq_factor:
            f = f / scaling.factor
        elif wave >= scaling.original_max_position_embeddings / scaling.high_freq_factor:
            s = scaling.original_max_position_embeddings / wave - scaling.low_freq_factor
            s /= scaling.high_freq_factor - scaling.low_freq_factor
            f = (1 - s) * f / scaling.factor + s * f
        made.append(f)
    return np.array(made)


@pytest.mark.parametrize("scaling", [LLAMA_31, LLAMA_32, ops.Llama3Scaling(4.0, 1.5, 2.5, 32)])
@pytest.mark.parametrize("dim", [64, 128])
def test_frequencies_are_those_of_the_equation(dim, scaling):
    """Computed in float64 and rounded once: half an ulp of float32, 2^-24, and the roundings of float64."""
    want = oracle(dim, 500_000.0, scaling)
    np.testing.assert_allclose(frequencies(dim, 500_000.0, scaling), want, rtol=2.0**-24 + 1e-12)
    ratio = want * 500_000.0 ** (np.arange(0, dim, 2) / dim)
    assert ratio[0] == 1.0
    assert np.isclose(ratio[-1], 1 / scaling.factor)
    assert any(1.01 / scaling.factor < r < 0.99 for r in ratio)  # all three regimes occur


def test_positions_behind_the_original_context_are_turned_by_the_scaled_angles():
    scaling, length, dim = ops.Llama3Scaling(8.0, 1.0, 4.0, 32), 96, 16
    x = jax.random.normal(jax.random.key(0), (1, length, 2, dim))
    angle = np.arange(length)[:, None] * oracle(dim, 10_000.0, scaling)
    turn = np.exp(1j * angle)[None, :, None, :]
    pairs = np.asarray(x, np.float64)[..., : dim // 2] + 1j * np.asarray(x, np.float64)[..., dim // 2 :]
    want = np.concatenate([(pairs * turn).real, (pairs * turn).imag], -1)
    got, pull = jax.vjp(lambda x: ops.rope(x, scaling=scaling), x)
    # Angles of up to 95 radians, each off by the two roundings of frequency and product, 95 * 2^-23 = 1.1e-5 at most.
    bound = 2 * length * 2.0**-24 * float(jnp.abs(x).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * bound)
    assert float(jnp.abs(got - ops.rope(x))[:, -1].max()) > 0.1  # scaling is something else than none
    np.testing.assert_allclose(pull(got)[0], x, rtol=0, atol=4 * bound)  # the transpose of a rotation is its inverse
    assert not jax.tree.leaves(pull)


def test_scalings_that_say_nothing_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Llama3Scaling: factor=0.5; use 1 or more"):
        ops.Llama3Scaling(0.5, 1.0, 4.0, 8192)
    with pytest.raises(ValueError, match=r"factor=nan; use 1 or more"):
        ops.Llama3Scaling(math.nan, 1.0, 4.0, 8192)
    with pytest.raises(ValueError, match=r"low_freq_factor=4.0, high_freq_factor=4.0; use 0 < low < high"):
        ops.Llama3Scaling(8.0, 4.0, 4.0, 8192)
    with pytest.raises(ValueError, match=r"original_max_position_embeddings=0; use 1 or more"):
        ops.Llama3Scaling(8.0, 1.0, 4.0, 0)

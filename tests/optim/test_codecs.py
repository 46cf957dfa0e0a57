"""What holds for every codec, whatever the numbers: zeros, signs, scales, ragged tails, the ends of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_jax import codecs
from coat_jax.optim import adam_formula
from coat_jax.optim.adam_formula import Moments
from coat_jax.optim.leaves import choose_groups, leaf_codec
from coat_jax.optim.step import groups_of
from coat_jax.quant import PerGroup, rounding

NAMES = [name for name in codecs.names() if name != "float32"]
SIZE = 300  # two groups and a ragged one
EVERY = settings(deadline=None, max_examples=25)
MAGNITUDES = st.floats(-60, 60).map(lambda e: float(np.float32(2.0**e)))


def stored(name):
    """A jitted function from two moments to what they are read back as, and to their codes."""
    codec = codecs.named(name)
    groups = groups_of(codec, (SIZE,))
    noise = adam_formula.noise_of(3, lambda: groups.split(rounding.element_index((SIZE,))), jnp.int32(3), codec.antithetic)

    @jax.jit
    def run(mu, nu):
        pair = Moments(groups.split(mu), groups.split(nu))
        kept = adam_formula.encode(pair, codec, groups.axes, jnp.zeros(pair.mu.shape, bool), noise)
        back = adam_formula.decode(kept, codec, groups.axes)
        return groups.merge(back.mu), groups.merge(back.nu), kept

    return run


FUNCTIONS = {name: stored(name) for name in NAMES}


def draw(seed, sigma, scale):
    rng = np.random.default_rng(seed)
    spread = np.exp(sigma * rng.normal(size=SIZE))
    zero = rng.random(SIZE) < 0.1
    mu = np.where(zero, 0, scale * spread * rng.normal(size=SIZE)).astype(np.float32)
    nu = np.where(zero, 0, (scale * spread) ** 2 * rng.chisquare(4, SIZE)).astype(np.float32)
    return mu, nu


@pytest.mark.parametrize("name", NAMES)
@EVERY
@given(st.integers(0, 2**32 - 1), st.floats(0, 2), st.floats(-30, 30))
def test_zeros_signs_and_bounds(name, seed, sigma, exponent):
    """0 is exactly 0; nu that is not 0 never flushes; mu keeps its sign; what is read is a code or half a code off.

    The widest spacing, at amax, is 1/14 of it for E4M3 and 1/7 for E5M2, through an expansion 1 - (13/14)^(1/k). Ranges here
    stay under 60 octaves, so k is above 1/4 (E5M2: 1/2): half a code of mu is under 0.13 amax, and nu, which is rounded to
    either neighbour, within 0.27 amax.
    """
    mu, nu = draw(seed, sigma, 2.0**exponent)
    got_mu, got_nu = map(np.asarray, FUNCTIONS[name](mu, nu)[:2])
    assert np.all(got_nu[nu == 0] == 0) and np.all(got_mu[nu == 0] == 0)
    normal = nu >= 2.0**-126
    assert np.all(got_nu[normal] > 0)
    assert np.all(got_mu * mu >= 0)
    amax = np.array([np.abs(mu[i : i + 128]).max() for i in range(0, SIZE, 128)]).repeat(128)[:SIZE]
    if not codecs.named(name).relative:
        assert np.all(np.abs(got_mu - mu)[normal] <= 0.13 * amax[normal])
    top = np.array([nu[i : i + 128].max() for i in range(0, SIZE, 128)]).repeat(128)[:SIZE]
    assert np.all(np.abs(got_nu - nu) <= 0.27 * top)


@pytest.mark.parametrize("name", NAMES)
@EVERY
@given(st.integers(0, 1000), st.integers(-20, 20))
def test_a_power_of_two_moves_only_the_scales(name, seed, power):
    mu, nu = draw(seed, 1.0, 1.0)
    one, two = FUNCTIONS[name](mu, nu)[2], FUNCTIONS[name](mu * np.float32(2.0**power), nu * np.float32(4.0**power))[2]
    for a, b, factor in ((one.mu, two.mu, 1.0 if codecs.named(name).relative else 2.0**power), (one.nu, two.nu, 4.0**power)):
        np.testing.assert_array_equal(np.asarray(a.payload).view(np.uint8), np.asarray(b.payload).view(np.uint8))
        np.testing.assert_allclose(np.asarray(b.scale), np.asarray(a.scale) * factor, rtol=1e-6)
        if a.exponent is not None:
            np.testing.assert_array_equal(a.exponent, b.exponent)


@pytest.mark.parametrize("name", NAMES)
@EVERY
@given(MAGNITUDES, st.sampled_from([-1, 1]))
def test_constant_groups_and_single_elements(name, magnitude, sign):
    """One value, alone or everywhere, comes back: it is its group's amax, which has a code of its own."""
    constant = np.full(SIZE, sign * magnitude, np.float32), np.full(SIZE, magnitude, np.float32)
    alone = tuple(np.where(np.arange(SIZE) == 130, x, 0).astype(np.float32) for x in constant)
    for mu, nu in (constant, alone):
        got_mu, got_nu, _ = FUNCTIONS[name](mu, nu)
        np.testing.assert_allclose(np.asarray(got_mu), mu, rtol=2e-5)
        np.testing.assert_allclose(np.asarray(got_nu), nu, rtol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_ends_of_float32(name):
    ends = np.geomspace(1.2e-38, 1e38, SIZE).astype(np.float32)
    got_mu, got_nu, _ = FUNCTIONS[name](ends, ends)
    assert np.isfinite(got_mu).all() and np.isfinite(got_nu).all() and np.all(np.asarray(got_nu) > 0)


def test_leaves_and_axes_are_chosen_from_the_global_shape():
    for shape, groups in {
        (4096, 11008): PerGroup(128, -2),
        (11008, 4096): PerGroup(128, -1),
        (4, 4096, 11008): PerGroup(128, -2),
        (4864, 896): PerGroup(112, -1),
        (896, 4864): PerGroup(112, -2),
        (576, 1536): PerGroup(96, -1),
        (576, 576): PerGroup(72, -1),
        (6656, 6656): PerGroup(64, -1),
        (2304, 768): PerGroup(96, -1),
        (5,): PerGroup(128, -1),
    }.items():
        assert choose_groups(shape, 128) == groups, shape

    def quantized(name, shape, patterns=("*", "!*embed*", "!*scale", "!*bias"), least=4096):
        return leaf_codec(name, shape, codecs.COAT, patterns, least).quantizes

    assert quantized("layers/mlp/kernel", (128, 128))
    assert not quantized("token_EMBEDdings/kernel", (128, 128))
    assert not quantized("layers/norm/scale", (32, 4096))
    assert not quantized("layers/mlp/kernel", (16, 128))
    assert not quantized("scalar", ())
    assert not quantized("empty", (0, 128), least=0)
    assert quantized("embed", (128, 128), patterns=("*",))


def test_names():
    assert all(codecs.named(name) is codecs.named(name) for name in codecs.names())
    with pytest.raises(ValueError, match="codec='fp4' is unknown; use one of coat, coat_e5m2"):
        codecs.named("fp4")

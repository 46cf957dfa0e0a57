"""Stochastic rounding: one of two neighbours, unbiased where it counts, and the same bits however the array is placed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from agreement import EXPANSIONS, SHAPE, SPECS, same_bits, tile_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.quant import E4M3, INT8, PerGroup, PerTensor, PowerExpansion, QuantSpec, Rounding, dequantize, quantize

STOCHASTIC = {name: dataclasses.replace(spec, rounding=Rounding.STOCHASTIC) for name, spec in SPECS.items()}
POWER = STOCHASTIC["e4m3 power"]


@functools.partial(jax.jit, static_argnames="spec")
def rounded(x, spec, seed):
    return quantize(x, spec, seed=seed)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_code_is_a_neighbour(name):
    """Below or above y; y itself where y is a code. With an expansion y is known within 1e-3 code steps (agreement.py)."""
    spec, kind = STOCHASTIC[name], EXPANSIONS[type(STOCHASTIC[name].expansion)]
    x = np.abs(np.random.default_rng(0).normal(size=SHAPE)).astype(np.float32)
    q = rounded(x, spec, 7)
    tile = tile_of(spec.granularity, x.shape)
    want = oracle.encode(
        x, spec.format.name, tile, kind, bf16_scales=spec.scale_dtype.itemsize == 2, keep_nonzero=spec.keep_nonzero,
        exponents=None if q.exponent is None else np.asarray(q.exponent),
    )  # fmt: skip
    table = oracle.magnitudes(spec.format.name)
    code = np.searchsorted(table, np.asarray(q.payload).astype(np.float64))
    y = np.minimum(want.y, table[-1])
    place = np.interp(y, table, np.arange(len(table)))  # y in code steps
    assert np.all(np.abs(code - place) < (1 + 1e-3 if kind else 1))
    whole = np.abs(place - np.round(place)) == 0
    np.testing.assert_array_equal(code[whole], np.round(place)[whole])
    moved = code != oracle.nearest(want.y, spec.format.name)
    assert 0.1 < moved.mean() < 0.4, "a quarter of uniformly placed values goes to the farther neighbour"


@pytest.mark.parametrize("name", ["e4m3", "int8", "e4m3 power", "e5m2 power", "uint8 log", "int8 softsign"])
def test_unbiased_in_the_linear_domain(name):
    """The mean of n decoded copies is the value within t = gap sqrt(log(2 m / 1e-9) / 2n): Hoeffding's bound over m elements,
    gap the distance of the two decoded neighbours. For n = 2^15, t is gap / 48; probabilities taken in the code domain would
    miss it for the wide group here, whose neighbours lie at ratios up to 1.7."""
    spec, kind, n = STOCHASTIC[name], EXPANSIONS[type(STOCHASTIC[name].expansion)], 2**15
    row = np.exp2(np.random.default_rng(1).uniform(-9 if kind is None else -40, 0, 32)).astype(np.float32)
    if name == "uint8 log":
        row = np.maximum(row, np.float32(2.0**-24))  # what lies below its bound of 24 octaves takes code 1: not unbiased
    row[0] = 1.0
    q = rounded(np.tile(row, (n, 1)), spec, 3)
    mean = np.asarray(dequantize(q)).astype(np.float64).mean(axis=0)
    exponent = None if q.exponent is None else np.asarray(q.exponent[:1])
    want = oracle.encode(row[None], spec.format.name, (1, 32), kind, exponents=exponent)
    table = oracle.magnitudes(spec.format.name)
    below = np.clip(np.searchsorted(table, want.y * (1 - 1e-5), side="right") - 1, 0, len(table) - 2)
    low, high = (
        oracle.decode(table[i], np.zeros((1, 32), bool), np.asarray(q.scale[:1]), exponent, (1, 32), spec.format.name, kind)[0]
        for i in (below, below + 1)
    )
    gap = high - low
    bound = gap * np.sqrt(np.log(2 * 32 / 1e-9) / (2 * n)) + 1e-4 * row  # 1e-4: float32 in the maps themselves
    assert np.all(np.abs(mean - row) <= bound), (np.abs(mean - row) / bound).max()


def test_unbiased_over_seeds_as_over_elements():
    x = jnp.array([[448.0, 17.3, -0.77, 100.1]])
    spec = QuantSpec(E4M3, PerGroup(4), rounding=Rounding.STOCHASTIC)
    seeds = jnp.arange(2**14, dtype=jnp.uint32)
    mean = jax.jit(jax.vmap(lambda seed: dequantize(quantize(x, spec, seed=seed))))(seeds).mean(axis=0)
    gap = np.array([0.0, 2.0, 0.0625, 8.0])
    bound = gap * np.sqrt(np.log(2 * 4 / 1e-9) / 2**15) + 1e-4 * np.abs(x)
    assert np.all(np.abs(mean - x) <= bound)


def test_seeds_and_elements_draw_different_bits():
    x = np.full((64, 128), 1.03, np.float32)
    x[:, 0] = 448
    a, b = (np.asarray(rounded(x, STOCHASTIC["e4m3"], seed).payload).view(np.uint8)[:, 1:] for seed in (1, 2))
    assert 0.3 < np.mean(a != b) * 2 < 3
    assert len({row.tobytes() for row in a}) == 64


def test_same_seed_same_bits():
    x = np.random.default_rng(5).normal(size=SHAPE).astype(np.float32)
    assert same_bits(rounded(x, POWER, 11), rounded(x, POWER, jnp.uint32(11)))


@pytest.mark.parametrize("partition", [P("d"), P(None, "d"), P(("d", "e")), P("d", "e")], ids=str)
@pytest.mark.parametrize("granularity", [PerGroup(128), PerGroup(8, axis=-2), PerTensor()], ids=str)
def test_same_bits_on_one_device_and_on_eight(granularity, partition):
    spec = QuantSpec(E4M3, granularity, PowerExpansion(), Rounding.STOCHASTIC)
    x = np.random.default_rng(6).normal(size=(64, 1024)).astype(np.float32)
    names, sizes = (("d", "e"), (4, 2)) if "e" in str(partition) else (("d",), (8,))
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), names)
    placed = jax.device_put(x, NamedSharding(mesh, partition))
    assert same_bits(rounded(x, spec, 5), rounded(placed, spec, 5))


def test_a_seed_is_asked_for():
    with pytest.raises(ValueError, match="stochastically and seed is None; give a uint32 seed"):
        quantize(jnp.ones(4), QuantSpec(INT8, PerGroup(4), rounding="stochastic"))

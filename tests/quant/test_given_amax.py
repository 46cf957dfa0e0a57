"""An amax that is given instead of measured: the codes that it implies, in one pass."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.compiled import hlo
from coat_jax.quant import E4M3, E5M2, PerBlock, PerGroup, PerTensor, QuantSpec, dequantize, quantize

SPECS = {
    "tensor": QuantSpec(E4M3, PerTensor()),
    "tensor, bf16 scales": QuantSpec(E5M2, PerTensor(), scale_dtype=jnp.dtype(jnp.bfloat16)),
    "groups": QuantSpec(E4M3, PerGroup(16)),
    "blocks": QuantSpec(E4M3, PerBlock((16, 16))),
}


def measured(spec, x):
    """max |x| of every group, by plain reductions of a (40, 48) array."""
    tile = spec.granularity.tile(x.shape)
    rows, columns = (-(-n // t) for n, t in zip(x.shape, tile, strict=True))
    padded = jnp.pad(jnp.abs(x), ((0, rows * tile[0] - x.shape[0]), (0, columns * tile[1] - x.shape[1])))
    return padded.reshape(rows, tile[0], columns, tile[1]).max((1, 3))


@pytest.mark.parametrize("name", SPECS)
def test_its_own_amax_gives_the_codes_that_are_measured(name):
    spec, x = SPECS[name], jax.random.normal(jax.random.key(0), (40, 48))
    given, own = (
        jax.jit(lambda x, a: quantize(x, spec, amax=a))(x, measured(spec, x)),
        jax.jit(lambda x: quantize(x, spec))(x),
    )
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(own), strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_the_amax_of_the_step_before_scales_and_saturates(name):
    spec = SPECS[name]
    before, now = (jax.random.normal(jax.random.key(i), (40, 48)) for i in range(2))
    amax = measured(spec, before)
    q = quantize(now, spec, amax=amax)
    assert bool((q.scale == quantize(before, spec).scale).all())
    scale = q.scale.astype(jnp.float32)
    whole = jnp.repeat(jnp.repeat(scale, spec.granularity.tile(now.shape)[0], 0), spec.granularity.tile(now.shape)[1], 1)[
        :40, :48
    ]
    expected = jnp.clip(now * (1 / whole), -spec.format.max, spec.format.max).astype(spec.format.dtype)
    assert bool((q.payload.astype(jnp.float32) == expected.astype(jnp.float32)).all())
    assert bool((jnp.abs(dequantize(q)) <= spec.format.max * whole).all())


def test_a_program_that_is_given_the_amax_reduces_nothing():
    spec, x = SPECS["tensor"], jnp.ones((64, 64))

    def reductions(*args):
        compiled = jax.jit(lambda x, amax=None: quantize(x, spec, amax=amax)).lower(*args).compile()
        module = hlo.parse(compiled.as_text())
        return sum(i.opcode == "reduce" for c in module.computations.values() for i in c.instructions.values())

    assert reductions(x) > reductions(x, jnp.float32(1)) == 0


def test_what_does_not_fit_is_refused():
    x = jnp.ones((40, 48))
    with pytest.raises(ValueError, match=r"quantize: amax has shape \(\); the scales have \(40, 3\)"):
        quantize(x, SPECS["groups"], amax=jnp.float32(1))
    with pytest.raises(ValueError, match="implementation='pallas' has no kernel that is given the amax"):
        quantize(x, SPECS["tensor"], amax=jnp.float32(1), implementation="pallas")

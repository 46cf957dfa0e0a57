"""The same bits eagerly, under jit and under vmap; strict promotion; and the sentences people get for a wrong argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import SHAPE, SPECS, jit_dequantize, jit_quantize, payload_bytes, same_bits

from coat_jax.quant import (
    E4M3,
    LogRange,
    PerBlock,
    PerGroup,
    PowerExpansion,
    QuantSpec,
    Rounding,
    dequantize,
    quantize,
)

X = np.abs(np.random.default_rng(0).normal(size=SHAPE)).astype(np.float32)


@pytest.mark.parametrize("name", ["e4m3", "e4m3 per tensor", "int8 softsign"])
def test_same_bits_eagerly_and_under_jit(name):
    """No operation is left to the compiler: no quotient that becomes a product, no product that fuses into a sum."""
    eager, jitted = quantize(X, SPECS[name]), jit_quantize(X, SPECS[name])
    assert same_bits(eager, jitted)
    np.testing.assert_array_equal(dequantize(eager), jit_dequantize(jitted))


@pytest.mark.parametrize("name", ["e4m3 power, bf16 scales", "e5m2 power", "uint8 log"])
def test_same_codes_eagerly_and_under_jit(name):
    """exp2 is the compiler's, and jaxlib 0.10 fuses the product inside it: an ulp or two, which moves a code only where it
    lies within 1e-4 code steps of a boundary (agreement.py), one element in thousands. Scales and exponents are bit-equal."""
    eager, jitted = quantize(X, SPECS[name]), jit_quantize(X, SPECS[name])
    np.testing.assert_array_equal(eager.scale, jitted.scale)
    np.testing.assert_array_equal(eager.exponent, jitted.exponent)
    steps = np.abs(payload_bytes(eager).astype(int) - payload_bytes(jitted).astype(int))
    assert steps.max() <= 1 and np.mean(steps > 0) < 1e-3
    np.testing.assert_allclose(dequantize(eager), jit_dequantize(eager), rtol=2e-5)


@pytest.mark.parametrize("name", ["e4m3", "e4m3 power", "uint8 log"])
def test_strict_promotion(name):
    spec = SPECS[name]
    rounded = QuantSpec(spec.format, spec.granularity, spec.expansion, Rounding.STOCHASTIC, jnp.bfloat16, True)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for x in (jnp.asarray(X), jnp.asarray(X, jnp.bfloat16)):
            assert dequantize(quantize(x, spec)).dtype == x.dtype
            assert dequantize(quantize(x, rounded, seed=jnp.uint32(3))).dtype == x.dtype


@pytest.mark.parametrize(
    "error, sentence, call",
    [
        (TypeError, "quantize: x has dtype int32; only floating-point", lambda: quantize(jnp.arange(4), SPECS["e4m3"])),
        (TypeError, "quantize: x has dtype bool; only floating-point", lambda: quantize(np.ones(4, bool), SPECS["e4m3"])),
        (ValueError, "PerGroup: size=0 elements in a group; use 1 or more", lambda: PerGroup(0)),
        (ValueError, "PerGroup: axis=0; count axes from the end", lambda: PerGroup(16, axis=0)),
        (ValueError, "PerGroup: axis=-3 does not exist in shape", lambda: quantize(X, QuantSpec(E4M3, PerGroup(4, axis=-3)))),
        (ValueError, "PerBlock: block=.* needs 3 axes, shape .* has 2", lambda: PerBlock((2, 2, 2)).tile((255, 256))),
        (ValueError, "PerBlock: block=.*; every extent must be 1 or more", lambda: PerBlock((128, 0))),
        (ValueError, "PerBlock: block=.*; every extent must be 1 or more", lambda: PerBlock(())),
        (ValueError, "implementation='triton' is unknown; use None or one of 'xla'",
         lambda: quantize(X, SPECS["e4m3"], implementation="triton")),
        (ValueError, "dequantize: implementation='triton' is unknown",
         lambda: dequantize(quantize(X, SPECS["e4m3"]), implementation="triton")),
        (ValueError, "PowerExpansion: target=1; a range is greater than 1", lambda: PowerExpansion(target=1)),
        (ValueError, "LogRange: octaves=64; one byte holds", lambda: LogRange(octaves=64)),
        (TypeError, "QuantSpec: format='e4m3' is not a Format; use coat_jax.E4M3", lambda: QuantSpec("e4m3", PerGroup(4))),
        (TypeError, "QuantSpec: granularity=128; use PerTensor", lambda: QuantSpec(E4M3, 128)),
        (TypeError, "QuantSpec: expansion='power'; use PowerExpansion", lambda: QuantSpec(E4M3, PerGroup(4), "power")),
        (TypeError, "QuantSpec: scale_dtype=float16; use float32 or bfloat16",
         lambda: QuantSpec(E4M3, PerGroup(4), scale_dtype=jnp.float16)),
        (ValueError, "QuantSpec: rounding='up'; use 'nearest' or 'stochastic'",
         lambda: QuantSpec(E4M3, PerGroup(4), rounding="up")),
    ],
)  # fmt: skip
def test_errors_name_the_argument_the_value_and_the_way_out(error, sentence, call):
    with pytest.raises(error, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_classes_are_not_specs():
    """A class where an object is meant is the commonest slip: PerTensor for PerTensor()."""
    with pytest.raises(TypeError, match="granularity=.*; use PerTensor\\(\\)"):
        QuantSpec(E4M3, PerBlock)
    with pytest.raises(TypeError, match="expansion=.*; use PowerExpansion\\(\\)"):
        QuantSpec(E4M3, PerGroup(4), PowerExpansion)

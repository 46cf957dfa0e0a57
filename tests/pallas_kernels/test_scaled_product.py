"""The block-scaled product: interpreted, plain JAX's bytes where sums are exact; within the bound of float32 sums elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreting import interpreted, numbers_like, same_bytes

from coat_jax import ops, recipes
from coat_jax.quant import E4M3, E5M2, PerBlock, PerGroup, QuantizedArray, QuantSpec, quantize, scaled_product
from pallas_kernels import backend
from pallas_kernels import scaled_product as kernel

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
@pytest.mark.parametrize("right, columns", [(GROUPS, 128), (BLOCKS, 128), (BLOCKS, 64)], ids=str)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking would take minutes
@given(m=st.integers(1, 300), n=st.integers(1, 300), k=st.integers(1, 600))
def test_interpreted_bytes_are_those_of_plain_jax(right, columns, m, n, k):
    """Every shape, ragged ones included; the interpreter's detector raises where copies and reads race."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "COLUMNS", (columns,))
        same_bytes(*products(whole((m, k), GROUPS, m), whole((n, k), right, n)))


@interpreted
def test_more_tiles_than_programs_and_more_blocks_than_stages():
    same_bytes(*products(whole((384, 1024), GROUPS, 0), whole((136, 1024), BLOCKS, 1), jnp.bfloat16))


def test_tiles_are_as_wide_as_leaves_none_of_the_device_idle():
    def columns(m, n):
        return kernel.ProductLaunch.of((m, n, 512), True, (jnp.float8_e4m3fn,) * 2, jnp.bfloat16, False).columns

    assert columns(8192, 4096) == columns(1536, 1408) == 128
    assert columns(512, 1024) == 64


def test_formats_are_mixed_where_jax_can(monkeypatch):
    monkeypatch.setattr(backend, "can_mix_formats", False)
    a, b = whole((8, 128), GROUPS, 0), whole((8, 128), QuantSpec(E5M2, PerGroup(128)), 1)
    with pytest.raises(ValueError, match="float8_e4m3fn times float8_e5m2 needs jax 0.11"):
        kernel.scaled_product(a.payload, b.payload, a.scale, b.scale, dtype=jnp.float32)


@pytest.mark.plan
@pytest.mark.skipif(not backend.can_mix_formats, reason="needs jax 0.11")
def test_other_tiles_and_formats_compile_for_an_h100():
    from coat_jax.compiled import compile_for

    for m, n, dtype, right in ((203, 136, jnp.bfloat16, BLOCKS), (256, 128, jnp.float32, QuantSpec(E5M2, PerGroup(128)))):
        a, b = (
            jax.eval_shape(lambda x, spec=spec: quantize(x, spec), jax.ShapeDtypeStruct((rows, 300), jnp.float32))
            for rows, spec in ((m, GROUPS), (n, right))
        )
        program = compile_for("h100", lambda a, b, t=dtype: scaled_product(a, b, t, implementation="pallas"), a, b)
        assert "mosaic_gpu" in program.text


@interpreted
def test_a_layer_of_the_recipe_is_that_of_plain_jax():
    """Operands have the same bytes; what differs is the order of float32 sums of at most 256 products."""
    x, w, g = numbers_like((136, 256)), numbers_like((256, 128), 1), numbers_like((136, 128), 2)

    @functools.partial(jax.jit, static_argnums=0)
    def step(implementation, x, w, g):
        recipe = recipes.blocks().replace(implementation=implementation)
        y, pull = jax.vjp(lambda x, w: ops.linear([x], [w], recipe)[0], x, w)
        return y, *pull(g)

    for got, want in zip(step("interpret", x, w, g), step("xla", x, w, g), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=260 * 2.0**-24 * np.abs(want).max())


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


@interpreted
def test_vmap_is_a_loop_of_products():
    parts, b = [whole((16, 256), GROUPS, seed) for seed in range(2)], whole((24, 256), BLOCKS, 1)
    many = jax.tree.map(lambda *xs: jnp.stack(xs), *parts)
    want = jnp.stack([scaled_product(a, b, implementation="xla") for a in parts])
    for name in ("interpret", "xla", None):
        same_bytes(jax.jit(jax.vmap(lambda a, name=name: scaled_product(a, b, implementation=name)))(many), want)


def test_what_does_not_contract_is_refused():
    a, b = whole((8, 256), GROUPS, 0), whole((8, 256), BLOCKS, 1)
    with pytest.raises(ValueError, match=r"give \(m, k\) and \(n, k\)"):
        scaled_product(a, whole((8, 128), BLOCKS, 1))
    with pytest.raises(ValueError, match="groups of 128 along the last axis"):
        scaled_product(b, a)
    with pytest.raises(ValueError, match="no kernel for an empty array"):
        scaled_product(whole((0, 256), GROUPS, 0), b, implementation="pallas")

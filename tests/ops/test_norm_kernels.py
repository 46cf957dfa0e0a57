"""Norms that make and redo their stash in a kernel: interpreted, the bytes of the same formula in plain JAX."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreting import interpreted, numbers_like, same_bytes

from coat_jax import E4M3, PerGroup, QuantSpec, dequantize, ops, quantize, recipes
from coat_jax.ops.norm_kernels import mean_of_groups, norm_refusal
from coat_jax.ops.stash import restore_quantized

EPS = 1e-6
# A formula, and how many parameters it is given.
NORMS = {
    "rms": (functools.partial(ops.normalize_rms, eps=EPS), 1),
    "rms without weight": (functools.partial(ops.normalize_rms, eps=EPS), 0),
    "layer": (functools.partial(ops.normalize_layer, eps=EPS), 2),
    "layer, fast": (functools.partial(ops.normalize_layer, eps=EPS, fast_variance=True), 2),
}


def spec_of(size):
    return QuantSpec(E4M3, PerGroup(size), scale_dtype=jnp.bfloat16)


def arguments(shape, params, seed=0):
    """x, dy and float32 parameters."""
    x, dy = (numbers_like(shape, seed + i).astype(jnp.bfloat16) for i in range(2))
    return x, dy, [1 + 0.1 * numbers_like(shape[-1:], seed + 2 + i) for i in range(params)]


def step(fn, size, implementation):
    """y, the stash, y again from the stash, and the gradients, jitted."""
    norm = ops.NormFunction(fn)

    @jax.jit
    def run(x, dy, params):
        y, kept = norm.forward([x], params, [spec_of(size)], implementation)
        again, pull = norm.recompute(kept, params, implementation)
        return y, restore_quantized(kept[0]), again(), pull(dy)

    return run


def in_groups(fn, size):
    """The same by plain JAX, on rows in groups: the statistics of rows are summed in the kernel's order."""

    @jax.jit
    def run(x, dy, params):
        split = lambda x: x.reshape(*x.shape[:-1], -1, size)  # noqa: E731
        of_rows = lambda x, *params: fn(x, *params, mean=mean_of_groups)  # noqa: E731
        params = [split(p) for p in params]
        q = quantize(x, spec_of(size))
        y = of_rows(split(x), *params).reshape(x.shape)
        again, pull = jax.vjp(of_rows, split(dequantize(q)), *params)
        dx, *dparams = pull(split(dy))
        return y, q, again.reshape(x.shape), (dx.reshape(x.shape), *(d.reshape(-1) for d in dparams))

    return run


@interpreted
@pytest.mark.parametrize(
    "norm, shape, size", [("rms", (3, 5, 256), 16), ("layer", (6, 1024), 128), ("layer, fast", (2, 2048), 32)]
)
def test_interpreted_bytes_are_those_of_plain_jax(norm, shape, size):
    """The stash to the byte. Elsewhere the compiler may fuse a product with a sum in one of two programs and not in the other:
    some ten roundings of 2^-24, each of which takes a value over a boundary of bf16, 2^-8 apart, once in 2^15 or so. Sums over
    rows are left out: of these a kernel has one per program. See below."""
    fn, params = NORMS[norm]
    args = arguments(shape, params)
    (y, q, again, (dx, *_)), (y1, q1, again1, (dx1, *_)) = step(fn, size, "interpret")(*args), in_groups(fn, size)(*args)
    same_bytes(q, q1)
    for got, want in ((y, y1), (again, again1), (dx, dx1)):
        steps = np.abs(np.asarray(got).view(np.int16).astype(int) - np.asarray(want).view(np.int16))
        assert steps.max() <= 1 and np.mean(steps) < 2e-3


def distance(a, b):
    """Largest difference over the largest magnitude."""
    a, b = np.float64(a), np.float64(b)
    return np.max(np.abs(a - b)) / np.max(np.abs(b))


@interpreted
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(norm=st.sampled_from(list(NORMS)), rows=st.integers(1, 9), blocks=st.integers(1, 5), size=st.sampled_from([16, 32]))
def test_any_shape_agrees_with_xla_and_with_float64(norm, rows, blocks, size):
    """The stash to the byte: it is of x itself. The rest up to the order of sums, which moves a float32 statistic of n
    elements by at most n 2^-24 of it, here 1280 2^-24 < 2^-13, so that a bf16 result may be its neighbour, 2^-8 away."""
    fn, params = NORMS[norm]
    x, dy, params = arguments((rows, blocks * 256), params, seed=rows)
    got, want = (step(fn, size, i)(x, dy, params) for i in ("interpret", "xla"))
    same_bytes(got[1], want[1])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(a, b) <= 2**-8
    codes = oracle.encode(np.float64(x), "e4m3", (1, size), bf16_scales=True)
    np.testing.assert_array_equal(np.asarray(got[1].payload).view(np.uint8), codes.payload("e4m3"))
    np.testing.assert_array_equal(np.float32(got[1].scale), codes.scale)


@interpreted
def test_gradients_are_those_of_float32_autodiff():
    """At the very values that the stash decodes to: what remains is the rounding of dx to bf16, 2^-9, and of sums."""
    fn, count = NORMS["layer"]
    x, dy, params = arguments((7, 512), count)
    _, q, _, gradients = step(fn, 16, "interpret")(x, dy, params)
    exact = functools.partial(fn, dtype=jnp.float32)
    _, pull = jax.vjp(exact, dequantize(q).astype(jnp.float32), *params)
    for got, want in zip(gradients, pull(dy.astype(jnp.float32)), strict=True):
        assert distance(got, want) <= 2**-8


@interpreted
def test_rows_of_zeros_and_of_no_numbers_stay_themselves():
    fn, count = NORMS["rms"]
    x, dy, params = arguments((8, 256), count)
    x = x.at[2].set(0.0).at[4, 7].set(jnp.nan).at[6, 9].set(jnp.inf)
    (y, q, _, (dx, _)), want = step(fn, 16, "interpret")(x, dy, params), in_groups(fn, 16)(x, dy, params)
    same_bytes((y, q, dx), (*want[:2], want[3][0]))
    finite = [np.isfinite(np.float32(part)).all(axis=1) for part in (y, dx)]
    np.testing.assert_array_equal(finite, 2 * [[row not in (4, 6) for row in range(8)]])
    assert not np.any(np.float32(y[2]))


@interpreted
def test_batches_are_more_rows():
    fn, _ = NORMS["rms"]
    x, dy, params = arguments((3, 4, 256), 1)
    batched = jax.vmap(step(fn, 16, "interpret"), in_axes=(0, 0, None))(x, dy, params)
    y, q, again, (dx, dw) = step(fn, 16, "interpret")(x, dy, params)
    same_bytes((batched[0], batched[1], batched[2], batched[3][0]), (y, q, again, dx))
    np.testing.assert_allclose(batched[3][1].sum(0), dw, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("op, count", [(ops.rms_norm, 1), (ops.layer_norm, 2)])
def test_an_op_takes_the_kernels_that_its_recipe_names(op, count):
    """One forward, one backward; unless a recipe names them, none."""
    x, dy, params = arguments((4, 256), count)

    def kernels(recipe):
        launched = jax.make_jaxpr(lambda x: jax.vjp(lambda x: op(x, *params, recipe), x)[1](dy))(x)
        return [name for name in ("norm", "norm_again", "norm_gradient") if f"name={name}\n" in str(launched)]

    assert kernels(recipes.coat().replace(implementation="interpret")) == ["norm", "norm_gradient"]
    assert kernels(recipes.coat().replace(implementation="xla")) == []


@interpreted
def test_before_products_a_norm_is_a_kernel_where_a_recipe_names_them():
    """Without redoing, h is kept and the norm is not run again; with it, it is, from the stash."""
    x, _, [scale] = arguments((4, 1024), 1)
    kernel = jnp.ones((1024, 16), jnp.bfloat16)

    def kernels(recipe):
        norm = ops.Prologue(ops.NormFunction(NORMS["rms"][0]), recipe.nonlinear_input, (scale,))
        launched = jax.make_jaxpr(jax.grad(lambda x: ops.linear([x], [kernel], recipe, prologue=norm)[0].sum()))(x)
        return [name for name in ("norm", "norm_again", "norm_gradient") if f"name={name}\n" in str(launched)]

    assert kernels(recipes.coat().replace(implementation="interpret")) == ["norm", "norm_gradient"]
    assert kernels(recipes.lean().replace(implementation="interpret")) == ["norm", "norm_again", "norm_gradient"]
    assert kernels(recipes.lean()) == []


@pytest.mark.plan
def test_left_to_the_library_a_norm_by_itself_is_a_kernel_on_a_hopper_gpu():
    """Two launches, one forward, one backward. Rows of 40 groups have another register layout than those of 16, 32, ..."""
    from coat_jax.compiled import compile_for

    def gradient(x, weight, dy):
        return jax.vjp(lambda x, weight: ops.rms_norm(x, weight, recipes.lean()), x, weight)[1](dy)

    x, weight = jax.ShapeDtypeStruct((4096, 5120), jnp.bfloat16), jax.ShapeDtypeStruct((5120,), jnp.float32)
    text = compile_for("h100", gradient, x, weight, x).text
    assert len(re.findall(r"custom_call_target=\S*mosaic_gpu", text)) == 2


def test_other_rows_are_refused_with_the_reason():
    def refused(size, shape, *params, dtype=jnp.bfloat16, axis=-1):
        structs = [jax.ShapeDtypeStruct(s, dtype) for s in (shape, *params)]
        spec = QuantSpec(E4M3, PerGroup(size, axis=axis), scale_dtype=jnp.bfloat16)
        return norm_refusal(spec, structs[0], structs[1:])

    assert refused(16, (4, 256), (256,)) is None
    assert refused(128, (4, 5120)) is None
    assert refused(128, (4, 6656)) is not None and refused(16, (4, 6656)) is None
    with pytest.raises(
        ValueError, match="rows of 1024, 2048, ... 8192 elements in groups of 128, not of 640; use None or 'xla'"
    ):
        jax.grad(lambda x: ops.rms_norm(x, None, recipes.lean().replace(implementation="interpret")).sum())(jnp.ones((2, 640)))
    assert "not of 4" in refused(4, (4, 256))
    assert "along them only" in refused(16, (256, 256), axis=-2)
    assert "parameters of shape (256,), not of (1,)" in refused(16, (4, 256), (1,))
    assert "16-bit numbers, not of float32" in refused(16, (4, 256), dtype=jnp.float32)


def test_what_no_kernel_takes_is_left_to_xla_unless_a_kernel_is_asked_for():
    """Rows of another width, a parameter for all features, integers: as before there were kernels."""
    coat, xla = recipes.coat(), recipes.coat().replace(implementation="xla")
    for x, weight in ((jnp.ones((2, 70)), None), (jnp.ones((2, 256)), jnp.ones(1)), (jnp.ones((2, 256), jnp.int32), None)):
        same_bytes(*(jax.jit(lambda x, r=r, w=weight: ops.rms_norm(x, w, r, dtype=jnp.float32))(x) for r in (coat, xla)))
    q = jax.vjp(lambda x: ops.rms_norm(x, None, coat, dtype=jnp.float32), jnp.ones((2, 256), jnp.int32))[0]
    assert q.dtype == jnp.float32

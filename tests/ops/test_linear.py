"""Weight products: values, gradients, what is kept, and the laws of their quantization."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_bounds import BF16, E4M3_RMS, E5M2_RMS, in_squares, relative

from coat_jax import E4M3, PerGroup, PerTensor, QuantSpec, ops, recipes
from coat_jax.ops import stash
from coat_jax.quant import dequantize, product, quantize

SHAPES = [(64, 256, 192), (33, 7, 1003), (1, 1000, 5), (1, 1, 1)]
PROLOGUE = functools.partial(ops.normalize_rms, eps=1e-6)


def data(rows, inner, outer, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inner)).astype(dtype)
    return x, jax.random.normal(keys[1], (inner, outer)) * 0.05, jax.random.normal(keys[2], (rows, outer)).astype(dtype)


def dense(recipe, x, w):
    return ops.linear([x], [w], recipe)[0]


def normed(recipe, x, scale, w):
    return ops.linear([x], [w], recipe, prologue=ops.Prologue(PROLOGUE, recipe.nonlinear_input, (scale,)))[0]


# Of Y, of dX, of dW. H enters dW of blocks twice rounded: what is kept of it has groups along the features, dW along the rows.
OPERANDS = {
    "coat": ((E4M3_RMS, E4M3_RMS), (E5M2_RMS, E4M3_RMS), (E4M3_RMS, E5M2_RMS)),
    "blocks": ((E4M3_RMS, E4M3_RMS), (E4M3_RMS, E4M3_RMS), (E4M3_RMS, E4M3_RMS, E4M3_RMS)),
}


@pytest.mark.parametrize(
    ("name", "shape"), [*(("coat", shape) for shape in SHAPES), *(("blocks", shape) for shape in SHAPES[:2])], ids=str
)
def test_product_and_gradients_are_off_by_their_operands_only(name, shape):
    forward, backward, weight = OPERANDS[name]
    x, w, g = data(*shape)
    # A single value is the group's amax and exact; few values may sit at the worst place of a step instead of anywhere.
    worst = np.sqrt(3) if min(shape) < 16 else 1.05
    y, pull = jax.jit(lambda x, w: jax.vjp(functools.partial(dense, recipes.named(name)), x, w))(x, w)
    dx, dw = jax.jit(lambda pull, g: pull(g))(pull, g)
    assert relative(y, x @ w) <= worst * in_squares(*forward)
    assert relative(dx, g @ w.T) <= worst * in_squares(*backward)
    assert relative(dw, x.T @ g) <= worst * in_squares(*weight)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)


def test_what_is_redone_enters_the_weight_gradient_of_blocks_rounded_once():
    """dW = q(H^T) q(dY^T)^T in groups along the rows, of H as redone from its stash, not of the FP8 that was multiplied."""
    x, w, g = data(200, 256, 136)
    recipe = recipes.blocks()
    _, pull = jax.vjp(lambda w: ops.linear([x], [w], recipe, prologue=ops.Prologue(lambda x: x, recipe.nonlinear_input))[0], w)
    h = dequantize(quantize(x, recipe.nonlinear_input))
    left, right = (product.quantize_transposed(*pair) for pair in ((h, recipe.linear_input), (g, recipe.gradient)))
    assert bool((pull(g)[0] == product.scaled_product(left, right)).all())


@pytest.mark.plan
def test_products_of_blocks_are_kernels_on_an_h100_and_none_is_bfloat16():
    from coat_jax.compiled import compile_for

    x, w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 768), jnp.bfloat16)

    def step(x, w, g):
        y, pull = jax.vjp(functools.partial(dense, recipes.blocks()), x, w)
        return y, pull(g)

    program = compile_for("h100", step, x, w, jax.ShapeDtypeStruct((1024, 768), jnp.bfloat16))
    kernels = re.findall(r"custom-call\(.*mosaic_gpu.*op_name=\"[^\"]*?(\w+)/mpmd_map", program.text)
    assert sorted(kernels) == ["quantize"] * 2 + ["scaled_product"] * 3
    assert not re.search(r" dot\(|cublas|gemm", program.text)
    assert [product.kind for product in program.products] == ["f8"] * 3
    assert program.flops()["f8"] == 3 * 2 * 1024 * 512 * 768


@pytest.mark.parametrize("name", ["coat", "lean"])
def test_prologue_adds_the_error_of_its_stash(name):
    x, w, g = data(64, 256, 192)
    x = x * jnp.exp2(jnp.arange(64.0) % 7 - 3)[:, None]
    scale = 1 + 0.1 * jax.random.normal(jax.random.key(5), (256,))
    y, pull = jax.jit(lambda *a: jax.vjp(functools.partial(normed, recipes.named(name)), *a))(x, scale, w)
    dx, dscale, dw = jax.jit(lambda pull, g: pull(g))(pull, g)
    exact, exact_pull = jax.vjp(lambda x, s, w: PROLOGUE(x, s) @ w, x, scale, w)
    for value, true, errors in (
        (y, exact, (E4M3_RMS, E4M3_RMS)),
        (dw, exact_pull(g)[2], (E4M3_RMS, E4M3_RMS, E5M2_RMS)),  # lean: the stash, h quantized from it, the gradient
        (dscale, exact_pull(g)[1], (E4M3_RMS, E5M2_RMS, E4M3_RMS)),
        (dx, exact_pull(g)[0], (2 * E4M3_RMS, E5M2_RMS, E4M3_RMS)),  # x enters its own gradient twice
    ):
        assert relative(value, true) <= 1.05 * in_squares(*errors)


def test_a_no_row_product_is_empty_and_its_kernel_gradient_zero():
    x, w, g = data(0, 8, 4)
    y, pull = jax.vjp(functools.partial(dense, recipes.coat()), x, w)
    dx, dw = pull(g)
    assert (y.shape, dx.shape) == ((0, 4), (0, 8))
    assert not dw.any()


@pytest.mark.parametrize("kernel_dtype", [jnp.float32, jnp.bfloat16])
def test_bf16_activations_keep_their_dtype_and_kernels_theirs(kernel_dtype):
    x, w, g = data(64, 256, 192, jnp.bfloat16)
    w = w.astype(kernel_dtype)
    y, pull = jax.vjp(functools.partial(dense, recipes.coat()), x, w)
    dx, dw = pull(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, kernel_dtype)
    exact = x.astype(jnp.float32) @ w.astype(jnp.float32)
    assert relative(y, exact) <= 1.05 * in_squares(E4M3_RMS, E4M3_RMS, 3 * BF16)  # two scaled operands and a result in bf16


def test_what_is_kept():
    x, w, _ = data(64, 256, 192, jnp.bfloat16)
    scale = jnp.ones(256)
    kinds = {
        # (bytes of FP8, bytes of scales); kernel and norm scale are the caller's own arrays.
        "dense": (lambda: jax.vjp(functools.partial(dense, recipes.coat()), x, w), 64 * 256, 2),
        "coat": (lambda: jax.vjp(functools.partial(normed, recipes.coat()), x, scale, w), 2 * 64 * 256, 2 + 64 * 16 * 2),
        "lean": (lambda: jax.vjp(functools.partial(normed, recipes.lean()), x, scale, w), 64 * 256, 64 * 2 * 2),
    }
    for name, (run, codes, scales) in kinds.items():
        leaves = [leaf for leaf in jax.tree.leaves(run()[1]) if not any(leaf is own for own in (w, scale))]
        assert {str(leaf.dtype) for leaf in leaves} <= {"uint8", "bfloat16"}, name
        assert sum(leaf.nbytes for leaf in leaves if leaf.dtype == jnp.uint8) == codes, name
        assert sum(leaf.nbytes for leaf in leaves if leaf.dtype != jnp.uint8) == scales, name


def test_several_kernels_share_one_stash():
    x, w, _ = data(64, 256, 192, jnp.bfloat16)
    _, pull = jax.vjp(lambda x, a, b, c: ops.linear([x], [a, b, c], recipes.coat()), x, w, w + 1, w + 2)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.uint8) == x.size


def test_shared_input_is_kept_by_reference():
    x, w, _ = data(64, 256, 192, jnp.bfloat16)
    _, pull = jax.vjp(lambda x, w: ops.linear([x], [w], recipes.coat(), shared=True)[0], x, w)
    assert all(any(leaf is own for own in (x, w)) for leaf in jax.tree.leaves(pull))


@pytest.mark.parametrize("power", [13, -13])
def test_powers_of_two_change_scales_and_no_payload(power):
    x, w, g = data(64, 256, 192)
    for spec in (
        recipes.coat().linear_input,
        recipes.coat().gradient,
        recipes.coat().nonlinear_input,
        recipes.lean().attention,
    ):
        a, b = stash.keep(x, spec), stash.keep(x * 2.0**power, spec)
        assert bool((a.payload == b.payload).all())
        assert bool((a.scale.astype(jnp.float32) * 2.0**power == b.scale.astype(jnp.float32)).all())
    y, pull = jax.vjp(functools.partial(dense, recipes.coat()), x, w)
    far, far_pull = jax.vjp(functools.partial(dense, recipes.coat()), x * 2.0**power, w)
    assert bool((far == y * 2.0**power).all())
    assert bool((far_pull(g)[1] == pull(g)[1] * 2.0**power).all())


@pytest.mark.parametrize("size", [1e-6, 1e-20, 1e20])
def test_gradients_of_any_size_survive(size):
    x, w, g = data(64, 256, 192)
    _, pull = jax.vjp(functools.partial(normed, recipes.lean()), x, jnp.ones(256), w)
    for small, unit in zip(pull(g * size), pull(g), strict=True):
        assert relative(small / size, unit) <= 2 * E5M2_RMS  # a scale in bfloat16 lands elsewhere among the codes


@pytest.mark.parametrize(("name", "bad"), [("coat", jnp.nan), ("lean", jnp.inf)])
def test_what_is_not_finite_reaches_the_loss(name, bad):
    recipe = recipes.named(name)
    x, w, _ = data(8, 32, 16)
    x = x.at[3, 5].set(bad)
    q = x.reshape(1, 8, 2, 16)
    losses = {
        "linear": dense(recipe, x, w),
        "norm and linear": normed(recipe, x, jnp.ones(32), w),
        "rms_norm": ops.rms_norm(x, None, recipe),
        "layer_norm": ops.layer_norm(x, None, None, recipe),
        "swiglu": ops.swiglu(x, x, recipe),
        "multiply": ops.multiply(x, x, recipe),
        "attention": ops.attention_linear(q, q, q, [jnp.ones((32, 4))], recipe)[0],
        "cross entropy": ops.cross_entropy(x, w, jnp.zeros(8, int)),
    }
    for op, y in losses.items():
        assert not bool(jnp.isfinite(y.sum())), op


def test_general_contraction():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    kernel = jax.random.normal(jax.random.key(1), (4, 8, 5, 6))
    [y] = ops.linear([x], [kernel], recipes.coat(), axes=2)
    assert relative(y, jnp.einsum("abcd,cdef->abef", x, kernel)) <= 2 * 2.0**-4
    [flat] = ops.linear([x], [kernel.reshape(32, 30)], recipes.coat(), axes=2)
    assert bool((flat == y.reshape(2, 3, 30)).all())
    with pytest.raises(ValueError, match=r"linear: a kernel of shape \(7, 5\) does not contract with 32 features"):
        ops.linear([x], [jnp.ones((7, 5))], recipes.coat(), axes=2)


def test_every_role_can_be_replaced():
    x, w, g = data(64, 256, 192)
    fine = QuantSpec(E4M3, PerGroup(128))
    changes = {
        "gradient": QuantSpec(E4M3, PerTensor()),
        "weight": None,
        "linear_input": None,
        "nonlinear_input": fine,
        "attention": fine,
        "layer_input": fine,
        "recompute": True,
    }
    for role, value in changes.items():
        recipe = recipes.coat().replace(**{role: value})
        assert getattr(recipe, role) == value
        _, pull = jax.vjp(functools.partial(normed, recipe), x, jnp.ones(256), w)
        assert relative(pull(g)[2], PROLOGUE(x).T @ g) <= 1.05 * in_squares(E4M3_RMS, E4M3_RMS, E5M2_RMS)
    finer = recipes.coat().replace(gradient=changes["gradient"])
    _, pull = jax.vjp(functools.partial(dense, finer), x, w)
    assert relative(pull(g)[1], x.T @ g) <= 1.05 * in_squares(E4M3_RMS, E4M3_RMS)
    with pytest.raises(ValueError, match="Recipe.replace: 'gradients' is not a field"):
        recipes.coat().replace(gradients=None)
    with pytest.raises(TypeError, match="Recipe: weight='e4m3'"):
        recipes.coat().replace(weight="e4m3")
    with pytest.raises(ValueError, match="recipe='coats' is unknown; use one of coat, lean, blocks, bf16"):
        recipes.named("coats")

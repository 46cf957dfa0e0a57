"""Norms and functions element by element: exact forward, gradients taken at what the stash decodes to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_bounds import relative, stash_error

from coat_jax import ops, recipes

RECIPES = {"coat": (recipes.coat(), 16), "lean": (recipes.lean(), 128)}
SHAPES = [(3, 7), (2, 1003), (0, 64)]

# op(*inputs, recipe), the same op plain, number of inputs, and a bound of |d gradient_i / d input_j| per unit of cotangent.
OPS = {
    "silu": (ops.silu, jax.nn.silu, 1, lambda x: [0.5]),  # |silu''| <= 1/2
    "gelu": (ops.gelu, jax.nn.gelu, 1, lambda x: [0.81]),  # |gelu''| <= 2 phi(0) = 0.798, its tanh form 0.803
    "multiply": (ops.multiply, jnp.multiply, 2, lambda a, b: [1.0, 1.0]),
}


def inputs_of(shape, n, seed=0):
    keys = jax.random.split(jax.random.key(seed), n + 1)
    scales = jnp.exp2(jax.random.randint(keys[-1], shape, -6, 4).astype(jnp.float32))
    return [jax.random.normal(key, shape) * scales for key in keys[:n]]


def plain_and_stashed(op, plain, inputs):
    g = jax.random.normal(jax.random.key(9), inputs[0].shape)
    y, pull = jax.vjp(plain, *inputs)
    y8, pull8 = jax.vjp(op, *inputs)
    return (y, pull(g)), (y8, pull8(g)), g


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OPS)
def test_gradient_is_off_by_no_more_than_the_stash(name, recipe, shape):
    op, plain, n, curvature = OPS[name]
    recipe, size = RECIPES[recipe]
    inputs = inputs_of(shape, n)
    (y, grads), (y8, grads8), g = plain_and_stashed(lambda *xs: op(*xs, recipe), plain, inputs)
    assert bool((y == y8).all())
    other = inputs[::-1]  # gradient i of a product moves with the other input
    for i, (a, b) in enumerate(zip(grads8, grads, strict=True)):
        moved = other[i] if n == 2 else inputs[i]
        bound = np.abs(g) * curvature(*inputs)[i] * stash_error(moved, size) + 1e-6 * np.abs(b) + 1e-6 * np.abs(g)
        assert np.all(np.abs(np.asarray(a) - np.asarray(b)) <= bound)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("features", [7, 1003])
def test_norms_are_exact_forward_and_close_backward(features, recipe):
    recipe, _ = RECIPES[recipe]
    [x] = inputs_of((5, features), 1)
    weight, bias = 1 + 0.1 * x[0], x[1]
    rms, layer = functools.partial(ops.normalize_rms, eps=1e-6), functools.partial(ops.normalize_layer, eps=1e-6)
    for op, plain, args in (
        (lambda x, w: ops.rms_norm(x, w, recipe, eps=1e-6), rms, (x, weight)),
        (lambda x, w, b: ops.layer_norm(x, w, b, recipe, eps=1e-6), layer, (x, weight, bias)),
    ):
        (y, grads), (y8, grads8), _ = plain_and_stashed(op, plain, args)
        assert bool((y == y8).all())
        # x enters its gradient twice, through the normalised value and through the scale: two stash errors, each at most
        # 2^-4 of x; the gradients of weight (once) and bias (not at all) are within that too.
        for a, b in zip(grads8, grads, strict=True):
            assert relative(a, b) <= 2 * 2.0**-4


def test_swiglu_keeps_two_bytes_per_element_and_redoes_silu():
    gate, up = inputs_of((4, 256), 2)
    (y, grads), (y8, grads8), _ = plain_and_stashed(lambda a, b: ops.swiglu(a, b, recipes.lean()), ops.gate_silu, [gate, up])
    assert bool((y == y8).all())
    for a, b in zip(grads8, grads, strict=True):
        assert relative(a, b) <= 2 * 2.0**-4  # both inputs are off by at most 2^-4
    _, pull = jax.vjp(lambda a, b: ops.swiglu(a, b, recipes.lean()), gate, up)
    kept = jax.tree.leaves(pull)
    assert sorted(str(x.dtype) for x in kept) == ["bfloat16", "bfloat16", "uint8", "uint8"]
    assert sum(x.nbytes for x in kept) == 2 * 4 * (256 + 2 * 2)


@pytest.mark.parametrize("act", [ops.silu, ops.gelu, lambda x, recipe: ops.swiglu(x, x, recipe)])
def test_float64_goes_through_in_its_own_precision(act):
    """JAX computes in 64 bits where it is told to; the stash alone is coarser."""
    with jax.enable_x64(True):
        x = jnp.linspace(-4.0, 4.0, 64, dtype=jnp.float64)
        y, pull = jax.vjp(lambda x: act(x, recipes.coat()), x)
        exact, exact_pull = jax.vjp(lambda x: act(x, recipes.bf16()), x)
        [dx], [exact_dx] = pull(jnp.ones_like(y)), exact_pull(jnp.ones_like(y))
        assert y.dtype == dx.dtype == jnp.float64
        assert relative(y, exact) < 1e-14 and relative(dx, exact_dx) < 0.1  # a code of E4M3 is off by 1/16 at most


def test_shapes_that_differ_are_refused_by_name():
    with pytest.raises(ValueError, match=r"multiply: shapes \(2, 3\) and \(3,\) differ"):
        ops.multiply(jnp.ones((2, 3)), jnp.ones(3), recipes.coat())
    with pytest.raises(ValueError, match="add: shapes"):
        ops.add(jnp.ones((2, 3)), jnp.ones((1, 3)))


def test_addition_is_exact_and_keeps_nothing():
    x, y = inputs_of((4, 64), 2)
    z, pull = jax.vjp(ops.add, x, y)
    assert bool((z == x + y).all())
    assert not jax.tree.leaves(pull)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotation_keeps_lengths_and_sees_distances_only(theta):
    q = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 1, 2, 16)), (1, 12, 2, 16))
    k = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (1, 1, 2, 16)), (1, 12, 2, 16))
    rq, rk = ops.rope(q, theta=theta), ops.rope(k, theta=theta)
    np.testing.assert_allclose(jnp.sum(rq * rq, -1), jnp.sum(q * q, -1), rtol=1e-5)
    products = jnp.einsum("bthd,bshd->hts", rq, rk)
    np.testing.assert_allclose(products[:, 3, 1], products[:, 11, 9], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(products[:, 0, 0], jnp.sum(q[0, 0] * k[0, 0], -1), rtol=1e-4, atol=1e-5)
    # The transpose of a rotation is its inverse; nothing but positions is needed for it.
    y, pull = jax.vjp(ops.rope, q)
    np.testing.assert_allclose(pull(y)[0], q, rtol=1e-5, atol=1e-5)
    assert not jax.tree.leaves(pull)


def test_odd_heads_are_refused_by_name():
    with pytest.raises(ValueError, match="rope: x has shape"):
        ops.rope(jnp.ones((2, 3, 5)))


def test_embedding_sums_rows_in_float32_and_keeps_tokens_only():
    table = jax.random.normal(jax.random.key(0), (10, 8)).astype(jnp.bfloat16)
    tokens = jnp.array([[3] * 1000, [4] * 1000])
    y, pull = jax.vjp(lambda table: ops.embedding(tokens, table), table)
    assert bool((y[0, 5] == table[3]).all())
    assert sum(x.size for x in jax.tree.leaves(pull)) == tokens.size
    [grad] = pull(jnp.ones_like(y))
    assert float(grad[3, 0]) == 1000.0  # a sum in bfloat16 stops at 256
    assert float(jnp.abs(grad[:3]).max()) == 0.0
    with pytest.raises(TypeError, match="embedding: tokens have dtype float32"):
        ops.embedding(jnp.ones(3), table)

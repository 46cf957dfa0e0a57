"""A weight together with its codes: the same products and gradients, and no quantization where it is used."""

import jax
import jax.numpy as jnp
import pytest
from quantizations import quantizations

from coat_jax import E4M3, dequantize, ops, quantize, recipes

NAMES = ("coat", "lean", "blocks")


def data():
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (384, 256)), jax.random.normal(keys[1], (256, 128)) * 0.1


def layer(recipe, w, codes, x):
    kernel = w if codes is None else ops.CodedWeight(w, codes)
    [y] = ops.linear([x], [kernel], recipe, prologue=ops.Prologue(jnp.tanh, recipe.nonlinear_input))
    return y


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_have_the_bits_of_the_weight_alone(name, wrap):
    recipe, (x, w) = recipes.named(name), data()

    @jax.jit
    def step(w, codes, x):
        return jax.value_and_grad(lambda w, x: jnp.sum(wrap(lambda w, x: layer(recipe, w, codes, x))(w, x) ** 2), (0, 1))(w, x)

    alone, coded = step(w, None, x), step(w, ops.weight_codes(w, recipe), x)
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(coded), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_another_weight_are_what_the_products_read(name):
    recipe, (x, w) = recipes.named(name), data()
    [doubled] = ops.linear([x], [ops.CodedWeight(w, ops.weight_codes(2 * w, recipe))], recipe)
    assert bool((doubled == ops.linear([x], [2 * w], recipe)[0]).all())


def test_no_gradient_flows_into_the_codes():
    recipe, (x, w) = recipes.coat(), data()

    def loss(w):
        coded = ops.CodedWeight(w, ops.weight_codes(w, recipe))
        return jnp.sum(ops.linear([x], [coded], recipe)[0] ** 2)

    alone = jax.grad(lambda w: jnp.sum(ops.linear([x], [w], recipe)[0] ** 2))(w)
    assert bool((jax.grad(loss)(w) == alone).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_given_codes_rounds_no_weight(name):
    recipe, (x, w) = recipes.named(name), data()
    step = jax.jit(jax.grad(lambda w, codes, x: jnp.sum(layer(recipe, w, codes, x) ** 2)))
    codes = ops.weight_codes(w, recipe)

    count = lambda codes: len(quantizations(step.lower(w, codes, x).compile(), w.size))  # noqa: E731
    assert count(None) > count(codes) == 0


def test_heads_are_contracted_as_one_matrix():
    recipe, q = recipes.lean(), jax.random.normal(jax.random.key(3), (1, 8, 2, 16), jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(4), (2, 16, 24)) * 0.1
    coded = ops.CodedWeight(kernel, ops.weight_codes(kernel, recipe, axes=2))
    [a], [b] = (ops.attention_linear(q, q, q, [w], recipe) for w in (kernel, coded))
    assert bool((a == b).all())
    assert (coded.shape, coded.ndim, coded.size, coded.dtype) == (kernel.shape, 3, 768, kernel.dtype)


def test_codes_that_do_not_belong_are_refused():
    recipe, (x, w) = recipes.coat(), data()
    codes = ops.weight_codes(w, recipe)
    assert ops.weight_codes(w, recipes.bf16()) is None
    for other in (recipes.blocks(), recipes.bf16()):
        with pytest.raises(ValueError, match=r"linear: the codes of a kernel are e4m3, tensor.* recipe.weight is"):
            ops.linear([x], [ops.CodedWeight(w, codes)], other)
    with pytest.raises(ValueError, match=r"codes of a kernel have shape \(256, 128\), its matrix is \(128, 256\)"):
        ops.linear([x[:, :128]], [ops.CodedWeight(w.T, codes)], recipe)


def test_codes_by_an_amax_that_is_given_are_those_of_quantize():
    w, recipe = jax.random.normal(jax.random.key(0), (16, 8)), recipes.coat()
    got, want = ops.weight_codes(w, recipe, amax=jnp.float32(2)), quantize(w, recipe.weight, amax=jnp.float32(2))
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    assert float(jnp.abs(w).max()) > 2  # larger elements saturate at the largest code times the scale, which is bf16:
    assert float(jnp.abs(dequantize(got)).max()) == E4M3.max * float(got.scale.max()) == 1.99609375

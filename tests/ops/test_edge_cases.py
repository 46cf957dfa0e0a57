"""Ops where they are hard: odd lengths and widths, one token, no rows, values that are not finite, strict promotion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops, recipes
from coat_jax.models import llama

EVERY = pytest.mark.parametrize("recipe", recipes.NAMES)


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def total(y: jax.Array) -> jax.Array:
    return jnp.sum(y.astype(jnp.float32))


@EVERY
@pytest.mark.parametrize("tokens", [1, 7])
def test_attention_trains_at_odd_lengths(recipe, tokens):
    """cuDNN has no backward pass for an odd number of tokens: there the op must choose XLA, whatever the forward pass takes."""
    q, k, w = normal(2, tokens, 4, 8), normal(2, tokens, 2, 8), normal(4, 8, 6)

    def loss(q, k, w):
        return total(ops.attention_linear(q, k, k, [w], recipes.named(recipe))[0])

    assert all(jnp.isfinite(total(g)) for g in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, w))


@EVERY
@pytest.mark.parametrize("rows", [(1, 1), (0, 4), (5,)], ids=str)
def test_products_of_any_rows_and_width(recipe, rows):
    """Widths that no group divides; a gradient of a batch without rows is exactly zero."""
    x, w = normal(*rows, 1003), normal(1003, 7, dtype=jnp.float32)

    @jax.jit
    def run(x, w):
        y, pull = jax.vjp(lambda x, w: ops.linear([x], [w], recipes.named(recipe))[0], x, w)
        return y, pull(jnp.ones_like(y))

    y, (dx, dw) = run(x, w)
    assert y.shape == (*rows, 7) and dx.shape == x.shape and dw.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), np.asarray(x, np.float32) @ np.asarray(w), atol=0.1 * np.sqrt(1003))
    assert x.size or not dw.any()


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_values_and_gradients(recipe, bad):
    recipe = recipes.named(recipe)
    x, w = normal(2, 4, 16), normal(16, 8, dtype=jnp.float32)

    def product(x, w):
        return ops.linear([x], [w], recipe)[0]

    broken = jax.jit(product)(x.at[0, 1, 3].set(bad), w)
    assert not jnp.isfinite(total(broken))
    dx, dw = jax.jit(lambda g: jax.vjp(product, x, w)[1](g))(normal(2, 4, 8).at[0, 0, 0].set(bad))
    assert not jnp.isfinite(total(dx)) and not jnp.isfinite(total(dw))
    grad = jax.jit(jax.grad(lambda x: total(ops.swiglu(x, x, recipe))))(x.at[0, 1, 3].set(bad))
    assert not jnp.isfinite(grad[0, 1, 3])


@EVERY
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradients_of_any_size_pass(recipe, size):
    """Current-tensor scaling: a loss scale changes gradients by itself and nothing else, within bf16 and E5M2 rounding."""
    x, w, g = normal(2, 4, 16), normal(16, 8, dtype=jnp.float32), normal(2, 4, 8)
    pull = jax.jit(lambda g: jax.vjp(lambda x, w: ops.linear([x], [w], recipes.named(recipe))[0], x, w)[1](g))
    size = np.float32(2.0 ** np.round(np.log2(size)))
    for one, scaled in zip(pull(g), pull((g * size).astype(g.dtype)), strict=True):
        np.testing.assert_allclose(scaled.astype(jnp.float32) / size, one.astype(jnp.float32), rtol=1e-2, atol=1e-3)


@EVERY
def test_strict_promotion(recipe):
    """Attention is left out: jax.nn.dot_product_attention itself promotes."""
    recipe = recipes.named(recipe)
    x, w = normal(2, 4, 16), normal(16, 8, dtype=jnp.float32)
    ones, tokens = jnp.ones(16), jnp.zeros((2, 4), jnp.int32)

    def loss(x, w):
        y = ops.linear([ops.layer_norm(ops.rms_norm(x, ones, recipe), ones, ones, recipe)], [w], recipe)[0]
        y = ops.multiply(ops.swiglu(y, y, recipe), ops.gelu(ops.silu(y, recipe), recipe), recipe)
        y = ops.rope(y.reshape(2, 4, 1, 8)).reshape(2, 4, 8) + ops.embedding(tokens, w, dtype=y.dtype)
        return ops.cross_entropy(y, w.T, tokens)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        dx, dw = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_model_takes_an_empty_batch():
    """There are logits of no tokens; a mean loss of none is refused."""
    model = llama.Llama(llama.preset("tiny", layers=1))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    for shape in ((0, 8), (2, 0)):
        tokens = jnp.zeros(shape, jnp.int32)
        assert jax.eval_shape(lambda p, t: model.apply({"params": p}, t), params, tokens).shape == (*shape, 256)
        with pytest.raises(ValueError, match="no tokens"):
            jax.eval_shape(lambda p, t: model.apply({"params": p}, t, t, method=model.loss), params, tokens)

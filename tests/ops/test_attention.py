"""Attention against its formula, with every way of keeping q, k and v."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_bounds import E4M3_RMS, E5M2_RMS, in_squares, relative

from coat_jax import ops, recipes


def arrays(batch=2, tokens=12, heads=4, kv_heads=2, width=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, tokens, n, width) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=False))
    return q, k, v, jax.random.normal(keys[3], (heads, width, 24)) * 0.1


def formula(q, k, v, causal=True, mask=None):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, True)])
def test_attention_and_its_gradient_follow_the_formula(causal, masked):
    q, k, v, _ = arrays()
    mask = jnp.arange(12)[None, None, None, :] < jnp.array([12, 7])[:, None, None, None] if masked else None
    y, pull = jax.vjp(functools.partial(ops.attention, causal=causal, mask=mask), q, k, v)
    z, exact = jax.vjp(functools.partial(formula, causal=causal, mask=mask), q, k, v)
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)
    for a, b in zip(pull(y), exact(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_attention_keeps_no_matrix_and_chooses_where_it_runs():
    q, k, v, _ = arrays(dtype=jnp.bfloat16, tokens=64)
    y, pull = jax.vjp(ops.attention, q, k, v)  # cuDNN's residuals where it is installed, zeros on a CPU
    assert all(leaf.size <= q.size for leaf in jax.tree.leaves(pull))
    z, plain = jax.vjp(functools.partial(ops.attention, implementation="xla"), q, k, v)
    assert bool((y == z).all())
    assert all(bool((a == b).all()) for a, b in zip(pull(y), plain(y), strict=True))


@pytest.mark.parametrize("name", ["coat", "lean", "bf16"])
def test_output_projection_of_attention(name):
    q, k, v, kernel = arrays()
    recipe = recipes.named(name)
    run = lambda q, k, v, w: ops.attention_linear(q, k, v, [w], recipe)[0]  # noqa: E731
    y, pull = jax.jit(lambda *args: jax.vjp(run, *args))(q, k, v, kernel)
    exact = lambda q, k, v, w: jnp.einsum("bthd,hdf->btf", formula(q, k, v), w)  # noqa: E731
    z, exact_pull = jax.vjp(exact, q, k, v, kernel)
    if name == "bf16":
        np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-4)
    else:
        assert relative(y, z) <= 1.2 * in_squares(E4M3_RMS, E4M3_RMS)
        kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape != kernel.shape]
        fp8 = sum(leaf.nbytes for leaf in kept if leaf.dtype == jnp.uint8)
        assert fp8 == (q.size + k.size + v.size if name == "lean" else 0)
    # A score is q k^T / sqrt(d), about 1 here, off by the two stashes; the softmax passes that on with a factor of at most
    # 1. So each gradient adds to the errors of the product's operands those of q, k and v, q and k twice.
    errors = in_squares(E5M2_RMS, E4M3_RMS, *[E4M3_RMS] * 5) if name == "lean" else in_squares(E5M2_RMS, E4M3_RMS)
    for a, b in zip(pull(z), exact_pull(z), strict=True):
        assert relative(a, b) <= 1.2 * errors


def test_bad_arguments_are_refused_by_name():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="implementation='flash' is unknown; use None, 'cudnn' or 'xla'"):
        ops.attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="attention: 4 heads in q and 3 in k"):
        ops.attention(q, jnp.ones((2, 12, 3, 16)), v)

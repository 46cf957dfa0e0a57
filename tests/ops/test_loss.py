"""Chunked cross entropy equals Optax's of the whole, value and gradients, and never holds the logits of all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import ops


def reference(h, kernel, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ kernel, targets)
    return jnp.sum(losses * weights) / jnp.sum(weights)


@pytest.mark.parametrize(("shape", "chunk"), [((3, 10), 12), ((3, 10), 1024), ((1, 1), 1)])
def test_value_and_gradients(shape, chunk):
    keys = jax.random.split(jax.random.key(0), 4)
    h, kernel = jax.random.normal(keys[0], (*shape, 8)), jax.random.normal(keys[1], (8, 11))
    targets = jax.random.randint(keys[2], shape, 0, 11)
    weights = (jax.random.uniform(keys[3], shape) > 0.3).astype(jnp.float32) + 0.5
    ours = jax.value_and_grad(lambda h, w: ops.cross_entropy(h, w, targets, weights, chunk=chunk), (0, 1))(h, kernel)
    plain = jax.value_and_grad(lambda h, w: reference(h, w, targets, weights), (0, 1))(h, kernel)
    assert ours[0] == pytest.approx(float(ops.cross_entropy(h, kernel, targets, weights, chunk=chunk)), rel=1e-6)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # float32 sums in another order


def test_logits_of_all_tokens_never_exist():
    h, kernel = jax.ShapeDtypeStruct((4, 512, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 4096), jnp.float32)
    targets = jax.ShapeDtypeStruct((4, 512), jnp.int32)
    loss = lambda h, w, t: ops.cross_entropy(h, w, t, chunk=128)  # noqa: E731
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(h, kernel, targets).compile()
    logits = 4 * 512 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 2


def test_bad_arguments_are_refused_by_name():
    h, kernel = jnp.ones((2, 3, 8)), jnp.ones((8, 4))
    for targets, chunk, words in (
        (jnp.zeros((2, 4), int), 8, "targets have shape"),
        (jnp.zeros((2, 3), int), 0, "chunk=0 tokens"),
    ):
        with pytest.raises(ValueError, match=f"cross_entropy: {words}"):
            ops.cross_entropy(h, kernel, targets, chunk=chunk)
    with pytest.raises(ValueError, match="the mean over no tokens"):
        ops.cross_entropy(h[:, :0], kernel, jnp.zeros((2, 0), int))

"""A stacked leaf that is updated row by row has the bits of the leaf updated whole."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import codecs
from coat_jax.optim import step
from coat_jax.optim.step import Adam, Leaf, LeafUpdate, in_rows, zeros


@pytest.mark.parametrize("codec", [codecs.COAT, codecs.PLAIN_FP8])
def test_rows_of_a_stack_have_the_bits_of_the_whole(codec):
    grad = jax.random.normal(jax.random.key(0), (3, 16, 128)) * jnp.geomspace(1e-6, 1.0, 128)
    stepper = LeafUpdate.at(jnp.int32(4), Adam(0.9, 0.999, 1e-8, 0.0), codec)
    mu, nu = (zeros(grad.shape, spec) for spec in (codec.mu, codec.nu))
    whole = jax.jit(lambda *args: stepper.direction(*args, Leaf("layers/kernel")))(grad, mu, nu)

    def rows(grad, mu, nu):
        start = (jnp.zeros_like(grad), mu, nu)
        return in_rows(lambda g, kept, leaf: stepper.direction(g, *kept[1:], leaf), grad, start, Leaf("layers/kernel"))

    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(jax.jit(rows)(grad, mu, nu)), strict=True):
        assert a.dtype == b.dtype
        assert bool((a == b).all())


def test_only_large_stacks_go_by_rows():
    large = jax.ShapeDtypeStruct((2, step.ROWS_APART // 2, 1), jnp.float32)
    assert step.is_stack(large, Leaf("w"))
    assert not step.is_stack(large, Leaf("w", 0))  # already a row
    assert not step.is_stack(jax.ShapeDtypeStruct((step.ROWS_APART, 1), jnp.float32), Leaf("w"))  # no stack
    assert not step.is_stack(jax.ShapeDtypeStruct((2, 8, 128), jnp.float32), Leaf("w"))

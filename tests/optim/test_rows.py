"""A stacked leaf that is updated row by row has the bits of the leaf updated whole."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import codecs
from coat_jax.optim import step
from coat_jax.optim.adam_formula import Hyper
from coat_jax.optim.leaves import leaf_seed
from coat_jax.optim.step import Leaf, in_rows, step_leaf, zeros


@pytest.mark.parametrize("codec", [codecs.COAT, codecs.PLAIN_FP8])
def test_rows_of_a_stack_have_the_bits_of_the_whole(codec):
    grad = jax.random.normal(jax.random.key(0), (3, 16, 128)) * jnp.geomspace(1e-6, 1.0, 128)
    mu, nu = (zeros(grad, spec) for spec in (codec.mu, codec.nu))

    def one(leaf):
        return step_leaf(leaf, leaf_seed("layers/kernel"), codec, None, Hyper.of(jnp.int32(5), 0.9, 0.999, 1e-8, 0.0))

    whole = jax.jit(one)(Leaf(grad, mu, nu))
    rows = jax.jit(lambda leaf: in_rows(one, leaf))(Leaf(grad, mu, nu))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(rows), strict=True):
        assert a.dtype == b.dtype
        assert bool((a == b).all())


def test_only_large_stacks_go_by_rows():
    def is_stack(*shape, row=None):
        return step.is_stack(Leaf(jax.ShapeDtypeStruct(shape, jnp.float32), None, None, row=row))

    assert is_stack(2, step.ROWS_APART // 2, 1)
    assert not is_stack(2, step.ROWS_APART // 2, 1, row=0)  # already a row
    assert not is_stack(step.ROWS_APART, 1)  # no stack
    assert not is_stack(2, 8, 128)

"""Ops under a recipe that names an implementation: interpreted kernels give the bytes of plain JAX."""

import jax
import jax.numpy as jnp
import pytest
from test_group_map import interpreted, numbers_like, same_bytes

from coat_jax import ops, recipes

COAT = recipes.coat()


def both(fn, *args):
    """fn(*args, recipe) with everything it keeps and its gradients, jitted: by plain JAX, and interpreted."""

    def run(implementation):
        def step(args, g):
            y, pull = jax.vjp(lambda *xs: fn(*xs, COAT.replace(implementation=implementation)), *args)
            return y, jax.tree.leaves(pull), pull(g)

        return jax.jit(step)(args, numbers_like(args[0].shape, 9).astype(args[0].dtype))

    return run("xla"), run("interpret")


@interpreted
@pytest.mark.parametrize("shape", [(4, 3, 48), (5, 70)], ids=str)
def test_a_stash_is_that_of_plain_jax(shape):
    x, y = (numbers_like(shape, i).astype(jnp.bfloat16) for i in range(2))
    same_bytes(*both(ops.multiply, x, y))


def test_an_implementation_that_does_not_exist_or_cannot_run_is_refused():
    with pytest.raises(ValueError, match="Recipe: implementation='cuda' is unknown"):
        COAT.replace(implementation="cuda")
    with pytest.raises(ValueError, match="runs in programs for one Hopper GPU"):
        jax.grad(lambda x: ops.silu(x, COAT.replace(implementation="pallas")).sum())(jnp.ones((8, 128)))

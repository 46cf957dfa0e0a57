"""What an output is computed from: followed through calls and kernels, and all of a loop's inputs for what a loop makes."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.fused_step.dependence import sources, used
from pallas_kernels.dispatch import by_target

A, B, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


def in_turns(a, b):
    """(a, b) exchanged three times."""
    return jax.lax.scan(lambda carry, _: ((carry[1], carry[0]), None), (a, b), length=3)[0]


FUNCTIONS = {
    "a pair": (lambda a, b: (b, a), [B, A]),
    "a call": (jax.jit(lambda a, b: (b + 1, jnp.sin(a))), [B, A]),
    "a constant": (lambda a, b: (jnp.ones(3), a), [frozenset(), A]),
    "a kernel": (lambda a, b: by_target(lambda a, b: (b, a), lambda a, b: (b * 2, a), a, b), [B, A]),
    "a barrier": (lambda a, b: jax.lax.optimization_barrier((b, a)), [B, A]),
    "a loop": (in_turns, [BOTH, BOTH]),
}


@pytest.mark.parametrize(("function", "want"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_sources_of_every_output(function, want):
    assert sources(function, 1.0, 2.0) == want
    assert used(function, 1.0, 2.0) == frozenset().union(*want)

"""What tests of interpreted kernels share: the mark, random operands, and equality of bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.quant import dequantize, quantize
from pallas_kernels import backend

interpreted = pytest.mark.skipif(not backend.can_interpret, reason="the interpreter came with jax 0.12")


def same_bytes(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.atleast_1d(a, b)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def same_either_way(x, spec):
    """Plain JAX and the interpreted kernels give the same codes of x, and the same values of the codes."""
    q, r = (jax.jit(lambda x, i=i: quantize(x, spec, seed=5, implementation=i))(x) for i in ("xla", "interpret"))
    same_bytes(q, r)
    same_bytes(*(jax.jit(lambda q, i=i: dequantize(q, implementation=i))(q) for i in ("xla", "interpret")))


def numbers_like(shape, seed=0):
    """Values over many octaves, with zeros, both signs."""
    key, other, zero = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(key, shape) * jnp.exp(3 * jax.random.normal(other, shape))
    return jnp.where(jax.random.uniform(zero, shape) < 0.05, 0.0, x)

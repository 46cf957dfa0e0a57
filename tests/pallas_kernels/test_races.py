"""The interpreter's race detector is on for every interpreted kernel, and what it finds fails."""

import jax
import jax.numpy as jnp
import pytest
from interpreting import interpreted

from pallas_kernels import backend
from pallas_kernels.backend import plgpu


def copied(x, *, early):
    """x through shared memory, read before its copy has arrived where `early`."""

    def body(source, target, held, barrier):
        plgpu.copy_gmem_to_smem(source, held, barrier)
        value = held[...] if early else None
        plgpu.barrier_wait(barrier)
        target[...] = value if early else held[...]

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_arrivals=1)]
    options = {"name": "copied", "bytes_moved": 2 * x.nbytes, "interpret": True}
    return backend.launch(body, [like], scratch, {"program": 1}, **options)(x)[0]


@interpreted
def test_a_race_is_an_error():
    x = jnp.arange(64.0 * 128).reshape(64, 128)
    assert bool((copied(x, early=False) == x).all())
    with pytest.raises(RuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(copied(x, early=True))
    assert bool((copied(x, early=False) == x).all())

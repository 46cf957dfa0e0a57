"""The fused optimizer step: interpreted, the bytes of plain JAX; compiled, one pass over memory in place."""

import re

import jax
import jax.numpy as jnp
import pytest
from interpreting import interpreted, numbers_like, same_bytes

from coat_jax import coat_adamw, codecs

ROWS = {"in/kernel": (40, 128), "layers/kernel": (3, 8, 128), "norm/scale": (128,)}
COLUMNS = {"out/kernel": (256, 128)}
BIG = (4096, 8192)


def like(shapes, seed, factor=1.0):
    return {
        name: (factor * numbers_like(shape, seed + i)).astype(jnp.bfloat16) for i, (name, shape) in enumerate(shapes.items())
    }


@interpreted
@pytest.mark.parametrize(
    "codec, master, shapes", [("coat", "bf16+8", ROWS), ("coat", None, COLUMNS), ("log_relative", "bf16-stochastic", ROWS)]
)
def test_an_interpreted_step_is_that_of_plain_jax(codec, master, shapes):
    """From moments that a step has stored; leaves of one kind share a launch, those of float32 moments have none."""

    def optimizer(implementation):
        return coat_adamw(3e-4, b2=0.95, codec=codecs.named(codec), master=master, min_size=1, implementation=implementation)

    params = like(shapes, 0)
    first = jax.jit(optimizer("xla").update_and_apply)(like(shapes, 10, 1e-3), optimizer("xla").init(params), params)
    steps = [
        jax.jit(optimizer(name).update_and_apply)(like(shapes, 20, 1e-3), first[1], first[0]) for name in ("xla", "interpret")
    ]
    same_bytes(*steps)


def test_update_has_no_kernel_and_says_so():
    optimizer = coat_adamw(1e-3, implementation="interpret", min_size=1)
    params = like(ROWS, 0)
    with pytest.raises(ValueError, match="has a kernel for update_and_apply only"):
        optimizer.update(params, optimizer.init(params), params)


def big_step(master, implementation=None):
    optimizer = coat_adamw(3e-4, b2=0.95, master=master, implementation=implementation)
    params = {"kernel": jax.ShapeDtypeStruct(BIG, jnp.bfloat16)}
    return optimizer.update_and_apply, (params, jax.eval_shape(optimizer.init, params), params)


@interpreted
@pytest.mark.parametrize("master, most", [(None, 10.6), ("bf16+8", 12.7)])
def test_the_copies_of_a_step_move_every_byte_once(master, most):
    """bf16 weight read and written, bf16 gradient read, two moments of one byte and 5/128 read and written: 10.16 bytes per
    parameter; a byte of compensation read and written makes 12.16."""
    step, args = big_step(master, "interpret")
    [moved] = re.findall(r"bytes_accessed=(\d+)", str(jax.make_jaxpr(step)(*args)))
    assert int(moved) / (BIG[0] * BIG[1]) < most


@pytest.mark.plan
@pytest.mark.parametrize("master", [None, "bf16+8"])
def test_compiled_for_an_h100_a_step_is_one_kernel_in_place(master):
    from coat_jax.compiled import compile_for

    step, args = big_step(master)
    program = compile_for("h100", step, *args, donate_argnums=(1, 2))
    assert program.temp_bytes < 4096
    assert len(re.findall(r"custom_call_target=\S*mosaic_gpu", program.text)) == 1
    assert " copy(" not in program.text

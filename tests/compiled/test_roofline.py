"""The model of a step's time counts what moves and what is multiplied, and nothing twice."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.compiled import Program, devices, roofline

DEVICE = devices.named("h100")


def modelled(fn, *args):
    program = Program.of(jax.jit(fn).lower(*args).compile())
    return program, roofline.seconds(program, DEVICE)


def test_an_elementwise_kernel_reads_its_operands_and_writes_its_result():
    x = jnp.ones((1024, 1024))
    _, seconds = modelled(lambda x, y: jnp.tanh(x) * y + 1, x, x)
    assert seconds.products == seconds.exchanges == 0
    assert seconds.total == pytest.approx(3 * x.nbytes / DEVICE.memory_bytes_per_second, rel=1e-3)


def test_a_row_of_a_stack_counts_as_a_row():
    # Each of 8 trips reads a row and the carry and writes a row and the carry; never the whole stack.
    stack, carry = jnp.ones((8, 256, 256)), jnp.ones((256, 256))
    _, seconds = modelled(lambda c, s: jax.lax.scan(lambda c, row: (c + row, c * row), c, s), carry, stack)
    moved = seconds.total * DEVICE.memory_bytes_per_second
    assert 3 * stack.nbytes <= moved <= 12 * stack.nbytes


def test_products_run_at_the_ceiling_of_their_dtype():
    a = jnp.ones((512, 512), jnp.bfloat16)
    program, seconds = modelled(lambda a, b: a @ b, a, a)
    [kind] = program.flops()  # CPUs multiply bf16 as f32
    rate = DEVICE.bf16_flops / (2 if kind == "f32" else 1)
    assert seconds.products == pytest.approx(2 * 512**3 / rate)


def test_exchanges_hide_behind_kernels():
    assert roofline.Seconds(products=2.0, others=1.0, exchanges=2.5).total == 3.0
    assert roofline.Seconds(products=2.0, others=1.0, exchanges=3.5).total == 3.5

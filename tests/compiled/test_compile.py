"""Compiling for GPUs that are not here. Needs the `plan` extra."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from coat_jax.compiled import PlanError, compile_for, topology

LAYERS, TOKENS, WIDTH = 4, 1024, 512

# The same step in a process whose JAX has already started without the plug-in.
_STARTED = """
import jax
jax.devices()
import tests.compiled.test_compile as here
program = here.compiled(2)
print(program.peak_bytes, program.argument_bytes, program.temp_bytes, program.alias_bytes, program.count("f8"))
"""


def layer(x, w):
    """An FP8 product as XLA recognises it: both operands quantized, dequantized, multiplied."""

    def quantized(a):
        scale = jnp.max(jnp.abs(a)).astype(jnp.float32) / 448
        return (a / scale).astype(jnp.float8_e4m3fn).astype(a.dtype) * scale.astype(a.dtype)

    return x + quantized(x) @ quantized(w), None


def step(w, x):
    value, grads = jax.value_and_grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32)))(w)
    return w - (0.1 * grads).astype(w.dtype), value


def arguments():
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    return shape(LAYERS, WIDTH, WIDTH), shape(TOKENS, WIDTH)


def compiled(gpus, memory="unlimited"):
    specs = (PartitionSpec(None, "fsdp", None), PartitionSpec("fsdp", None))
    return compile_for("h100", step, *arguments(), gpus=gpus, donate_argnums=0, in_shardings=specs, memory=memory)


@pytest.fixture(scope="module")
def two_gpus():
    return compiled(2)


@pytest.mark.plan
def test_the_bytes_are_those_of_compiling_by_hand(two_gpus):
    from jax.experimental import topologies

    from coat_jax.compiled import devices

    target = devices.named("h100").target(10**13)
    gpus = topologies.get_topology_desc(platform="cuda", topology_name="t", target_config=target, topology="1x1x2").devices
    mesh = jax.sharding.Mesh(gpus, ("fsdp",))
    placed = tuple(NamedSharding(mesh, s) for s in (PartitionSpec(None, "fsdp", None), PartitionSpec("fsdp", None)))
    jitted = jax.jit(step, donate_argnums=0, in_shardings=placed)
    with jax.set_mesh(mesh):
        by_hand = jitted.lower(*arguments()).compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    memory = by_hand.memory_analysis()
    assert (two_gpus.peak_bytes, two_gpus.argument_bytes, two_gpus.temp_bytes, two_gpus.alias_bytes) == (
        memory.peak_memory_in_bytes,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
    )


@pytest.mark.plan
def test_arguments_are_a_share_per_gpu_and_products_run_in_f8(two_gpus):
    assert two_gpus.argument_bytes == (LAYERS * WIDTH * WIDTH + TOKENS * WIDTH) * 2 // 2
    assert two_gpus.count("f8") >= 1
    assert any(name.startswith("all-gather") for name in two_gpus.collective_bytes())


@pytest.mark.plan
def test_a_process_that_already_runs_jax_compiles_the_same_program_in_a_fresh_one(two_gpus):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run([sys.executable, "-c", _STARTED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    here = (two_gpus.peak_bytes, two_gpus.argument_bytes, two_gpus.temp_bytes, two_gpus.alias_bytes, two_gpus.count("f8"))
    assert tuple(map(int, done.stdout.split())) == here


def test_without_the_plug_in_one_line_says_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'coat-jax\[plan\]'$"):
        compiled(1)
    assert "\n" not in topology.missing()


def test_arguments_are_checked_before_anything_is_compiled():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(ValueError, match="2 places for gpus=4"):
        compile_for("h100", lambda x: x, x, gpus=4, mesh={"data": 1, "fsdp": 2})
    with pytest.raises(ValueError, match="device='tpu' is unknown"):
        compile_for("tpu", lambda x: x, x)
    with pytest.raises(ValueError, match="use 'unlimited' or 'real'"):
        compile_for("h100", lambda x: x, x, memory="all")

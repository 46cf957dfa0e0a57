"""Compiling for GPUs that are not here. Needs the `plan` extra."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
import user_program
from jax.sharding import NamedSharding, PartitionSpec

from coat_jax.compiled import PlanError, compile_for, topology

LAYERS, TOKENS, WIDTH = 4, 1024, 512

# What a notebook does: it has used JAX, and its arrays and keys are real. JAX then runs without the plug-in, and a process of
# its own compiles.
_NOTEBOOK = """
import jax, jax.numpy as jnp
from coat_jax import compile_for
key, x = jax.random.key(0), jnp.ones((64, 64), jnp.bfloat16)
shape = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
fn = lambda key, x, y: x @ y + jax.random.normal(key, (64, 64), jnp.bfloat16)
specs = (jax.P(), {"x": jax.P("fsdp")})
print(*(compile_for("h100", fn, key, a, b).argument_bytes for a in (shape, x) for b in (shape, x)))
print(compile_for("h100", lambda s, t: s * t["x"], 2.0, {"x": x}, gpus=2, in_shardings=specs).argument_bytes)
explicit = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    print(compile_for("h100", lambda x: x @ x, jax.device_put(x, jax.NamedSharding(explicit, jax.P("d")))).argument_bytes)
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


def compiled(gpus):
    specs = (PartitionSpec(None, "fsdp", None), PartitionSpec("fsdp", None))
    return compile_for("h100", step, *arguments(), gpus=gpus, donate_argnums=0, in_shardings=specs)


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
    # Such a program goes into JAX's persistent cache and does not come out again; see `topology.compile_lowered`.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    with jax.set_mesh(mesh):
        by_hand = jitted.lower(*arguments()).compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
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
def test_a_process_that_already_runs_jax_compiles_the_same_program_in_a_fresh_one(two_gpus, tmp_path):
    done = user_program.run(_NOTEBOOK, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    arrays, sharded, explicit, same = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    # Two bf16 matrices of 64 x 64, and a key of two uint32, which takes 8 bytes: whatever they are given as.
    assert arrays == (2 * 64 * 64 * 2 + 8,) * 4
    assert sharded == (4 + 64 * 64 * 2 // 2,) and explicit == (64 * 64 * 2,)
    here = (two_gpus.peak_bytes, two_gpus.argument_bytes, two_gpus.temp_bytes, two_gpus.alias_bytes, two_gpus.count("f8"))
    assert same == here


@pytest.mark.plan
def test_arrays_stand_for_their_shapes():
    x, shape = jnp.ones((64, 64)), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    programs = [compile_for("h100", lambda x: x @ x, a) for a in (x, shape)]
    assert programs[0].argument_bytes == programs[1].argument_bytes == 64 * 64 * 4
    assert programs[0].peak_bytes == programs[1].peak_bytes


# With JAX's persistent cache on, as many users have it: compiled twice, in two processes.
_CACHED = """
import jax, jax.numpy as jnp
from coat_jax.compiled import compile_for
print(compile_for("h100", lambda x: jnp.sin(x), jax.ShapeDtypeStruct((8,), jnp.float32)).argument_bytes)
"""


@pytest.mark.plan
def test_the_persistent_cache_is_left_out(tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for _ in range(2):
        done = user_program.run(_CACHED, tmp_path, JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1", **cache)
        assert (done.returncode, done.stdout.split()) == (0, ["32"]), done.stderr[-2000:]
        assert "cache" not in done.stderr


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

"""In place, sharded like the parameters, without communication, and the same bytes on one device and on eight."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import coat_adamw, codecs
from coat_jax.optim import state_specs

MESHES = {
    "rows": ((8,), ("fsdp",), P("fsdp", None)),
    "columns": ((8,), ("fsdp",), P(None, "fsdp")),
    "both": ((2, 4), ("data", "fsdp"), P("data", "fsdp")),
}
COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute")
LARGE = {"up": (4096, 11008), "square": (4096, 4096), "layers": (4, 4096, 11008)}
SMALL = {"up": (1024, 344), "layers": (2, 1024, 344)}


def abstract(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def sharded_step(optimizer, shapes, mesh_name):
    """The jitted step with shardings, and the shardings of (grads, state, params)."""
    sizes, names, spec = MESHES[mesh_name]
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), names)
    specs = {name: P(*([None] * (len(shape) - 2)), *spec) for name, shape in shapes.items()}
    state = jax.eval_shape(optimizer.init, abstract(shapes))
    tree = (specs, state_specs(state, abstract(shapes), specs, mesh.shape), specs)
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), tree, is_leaf=lambda node: isinstance(node, P))
    step = jax.jit(optimizer.update_and_apply, in_shardings=places, out_shardings=(places[2], places[1]), donate_argnums=(1, 2))
    return step, places, state


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("codec", ["log_relative"])
def test_the_step_has_no_collective_and_updates_in_place(codec, mesh_name):
    optimizer = coat_adamw(1e-3, codec=codecs.named(codec))
    step, _, state = sharded_step(optimizer, LARGE, mesh_name)
    params = abstract(LARGE)
    compiled = step.lower(params, state, params).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, params)))
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= one / 8


@pytest.mark.parametrize("codec,meshes", [("coat", ["rows", "columns"]), ("log_relative", ["both"])])
def test_eight_devices_give_the_bytes_of_one(codec, meshes):
    optimizer = coat_adamw(1e-3, codec=codecs.named(codec), weight_decay=0.1)
    keys = jax.random.split(jax.random.key(0), len(SMALL))
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SMALL.items(), strict=True)}
    grads = [jax.tree.map(lambda p, i=i: jnp.sin(p * (3.0 + i)), params) for i in range(2)]

    def run(step, place):
        carry = place((params, optimizer.init(params)))
        for grad in grads:
            carry = step(grad, carry[1], carry[0])
        return carry

    want = run(jax.jit(optimizer.update_and_apply), lambda tree: tree)
    for mesh_name in meshes:
        step, places, _ = sharded_step(optimizer, SMALL, mesh_name)
        got = run(
            lambda g, s, p, step=step, places=places: step(jax.device_put(g, places[0]), s, p),
            lambda tree, places=places: (jax.device_put(tree[0], places[2]), jax.device_put(tree[1], places[1])),
        )
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def update_of(leaves):
    """`update_and_apply` of plain XLA, its abstract arguments, and the bytes of what it donates."""
    optimizer = coat_adamw(1e-3, master="bf16+8", implementation="xla")
    params = {f"kernel_{i}": jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16) for i in range(leaves)}
    state = jax.eval_shape(optimizer.init, params)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, params)))
    return optimizer.update_and_apply, (params, state, params), kept


def memory_of(leaves):
    """What XLA plans for the update on this machine's CPU, and the bytes of what it donates."""
    update, args, kept = update_of(leaves)
    return jax.jit(update, donate_argnums=(1, 2)).lower(*args).compile().memory_analysis(), kept


def test_donated_parameters_and_state_are_updated_in_place():
    memory, kept = memory_of(2)
    assert memory.alias_size_in_bytes >= kept


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA for CPUs of jax 0.10 drops the barrier; for an H100 it does not"
)
def test_temporaries_do_not_grow_with_the_number_of_leaves():
    assert memory_of(6)[0].temp_size_in_bytes <= 1.1 * memory_of(2)[0].temp_size_in_bytes


@pytest.mark.plan
def test_temporaries_compiled_for_an_h100_do_not_grow_with_the_number_of_leaves():
    from coat_jax.compiled import compile_for

    few, many = (compile_for("h100", update_of(n)[0], *update_of(n)[1], donate_argnums=(1, 2)) for n in (2, 6))
    assert many.alias_bytes >= update_of(6)[2]
    assert many.temp_bytes <= 1.1 * few.temp_bytes


@pytest.mark.parametrize("master", [None, "bf16+8", "bf16-stochastic"])
@pytest.mark.parametrize("mesh_name", MESHES)
def test_explicit_axes_give_the_bytes_and_the_collectives_of_auto_ones(mesh_name, master):
    """`jax.make_mesh` makes Explicit axes: state, updates and parameters then say in their types where they lie."""
    sizes, names, spec = MESHES[mesh_name]
    dtype = jnp.float32 if master is None else jnp.bfloat16
    optimizer = coat_adamw(1e-2, codec=codecs.LOG_RELATIVE, master=master, weight_decay=0.1)
    start = {"up": jax.random.normal(jax.random.key(0), (1024, 344), dtype), "norm": jnp.ones((344,), dtype)}

    def run(kind):
        mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
        with jax.set_mesh(mesh):
            params = jax.device_put(start, {"up": NamedSharding(mesh, spec), "norm": NamedSharding(mesh, P())})
            state = optimizer.init(params)
            for step in (optimizer.update, optimizer.update_and_apply):
                grads = jax.tree.map(lambda p: jnp.sin(3 * p), params)
                compiled = jax.jit(step).lower(grads, state, params).compile()
                assert not COLLECTIVE.search(compiled.as_text())
                done, state = jax.jit(step)(grads, state, params)
                params = optax.apply_updates(params, done) if step is optimizer.update else done
        return params, state

    got, want = run(jax.sharding.AxisType.Explicit), run(jax.sharding.AxisType.Auto)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)
    place = jax.typeof(got[0]["up"]).sharding
    assert place.spec == spec == jax.typeof(got[1][0].mu.codes["up"]).sharding.spec
    assert jax.typeof(got[1][0].nu.scale["up"]).sharding.spec == spec


MODELS = {
    "Qwen2.5-0.5B": [(896, 896), (896, 128), (896, 4864), (4864, 896)],
    "SmolLM2-135M": [(576, 576), (576, 192), (576, 1536), (1536, 576)],
    "Llama-30B": [(6656, 6656), (6656, 17920), (17920, 6656)],
    "Llama-3-8B": [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)],
}


@pytest.mark.parametrize("model", MODELS)
def test_devices_share_the_leaves_of_models_that_people_have(model):
    """Two, four and eight of them, along either axis, each with whole groups; at most 2.2 bytes per parameter."""
    params = abstract({str(shape): shape for shape in MODELS[model]})
    for codec in (codecs.COAT, codecs.LOG_RELATIVE):
        adam = jax.eval_shape(coat_adamw(1e-3, codec=codec).init, params)[0]
        for name, leaf in params.items():
            parts = [part[name] for moment in (adam.mu, adam.nu) for part in moment if part[name] is not None]
            assert sum(part.size * part.dtype.itemsize for part in parts) <= 2.2 * leaf.size
            for size, groups in zip(leaf.shape, adam.mu.scale[name].shape, strict=True):
                assert groups % 8 == 0 and size % groups == 0, name


@pytest.mark.parametrize("mesh_name", ["rows", "columns"])
@pytest.mark.parametrize("model", ["Qwen2.5-0.5B", "SmolLM2-135M"])
def test_their_step_has_no_collective(model, mesh_name):
    shapes = {str(shape): shape for shape in MODELS[model]}
    step, _, state = sharded_step(coat_adamw(1e-3), shapes, mesh_name)
    assert not COLLECTIVE.search(step.lower(abstract(shapes), state, abstract(shapes)).compile().as_text())

"""Fully sharded data parallelism: where parameters and state live, and that a sharded step is the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coat_jax import coat_adamw, recipes
from coat_jax.compiled import Program
from coat_jax.models import llama
from coat_jax.optim import state_specs
from coat_jax.parallel import batch_sharded, batch_spec, fsdp_specs

GPUS = 4


def shapes():
    model = llama.Llama(llama.preset("tiny"), recipes.lean())
    return model, jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])


def test_every_large_parameter_is_sharded_once_and_layers_stay_whole():
    _, params = shapes()
    for path, spec in jax.tree_util.tree_leaves_with_path(fsdp_specs(params, GPUS), is_leaf=lambda x: x == PartitionSpec()):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        large = not name.endswith("scale")
        assert [axis for axis in spec if axis is not None] == ["fsdp"] * large, name
        assert not name.startswith("layers") or not spec or spec[0] is None, name


def test_a_parameter_that_nothing_divides_is_replicated():
    assert fsdp_specs({"head": jnp.zeros((129, 65))}, GPUS)["head"] == PartitionSpec()


@pytest.mark.parametrize(
    "make", [coat_adamw, optax.adamw, lambda lr: optax.chain(optax.clip_by_global_norm(1.0), coat_adamw(lr))]
)
def test_state_follows_its_parameters_and_counts_are_replicated(make):
    _, params = shapes()
    specs = fsdp_specs(params, GPUS)
    state = jax.eval_shape(make(1e-3).init, params)
    placed = state_specs(state, params, specs, {"fsdp": GPUS})
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    wanted = list(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)))
    codes = getattr(optax.tree.get(placed, "mu"), "codes", optax.tree.get(placed, "mu"))
    assert jax.tree.leaves(codes, is_leaf=lambda x: isinstance(x, PartitionSpec)) == wanted
    assert optax.tree.get(placed, "count") == PartitionSpec() or isinstance(optax.tree.get(placed, "count"), PartitionSpec)


def test_scales_stay_whole_along_an_axis_whose_groups_the_mesh_does_not_divide():
    params = {"kernel": jnp.zeros((1000, 101))}  # eight groups of 128 down, the last of them shorter
    state = jax.eval_shape(coat_adamw(1e-3).init, params)
    moment = state_specs(state, params, {"kernel": PartitionSpec("fsdp", None)}, {"fsdp": 5})[0].mu
    assert state[0].mu.scale["kernel"].shape == (8, 101)
    assert moment.codes["kernel"] == PartitionSpec("fsdp", None)
    assert moment.scale["kernel"] == moment.exponent["kernel"] == PartitionSpec(None, None)


def test_without_a_mesh_a_batch_is_left_alone():
    x = jnp.ones((3, 2))
    assert batch_sharded(x) is x


def test_a_sharded_step_gives_the_loss_and_the_parameters_of_one_device():
    # Quantized moments and FP8 products round alike; sums over sharded axes come in another order: BF16 bounds.
    model, params = shapes()
    tx = coat_adamw(1e-3)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    tokens = jax.random.randint(jax.random.key(1), (GPUS, 33), 0, 256)

    def step(params, state, tokens):
        def loss(params):
            return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method=model.loss)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    alone = jax.jit(step)(params, state, tokens)
    mesh = jax.make_mesh((GPUS,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:GPUS])
    specs = fsdp_specs(params, GPUS)
    tree = (specs, state_specs(state, params, specs, {"fsdp": GPUS}), batch_spec())
    placed = jax.tree.map(lambda s: NamedSharding(mesh, s), tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, in_shardings=placed, out_shardings=(placed[0], placed[1], None))
        compiled = jitted.lower(params, state, tokens).compile()
        sharded = jitted(*jax.device_put((params, state, tokens), placed))
    np.testing.assert_allclose(sharded[2], alone[2], rtol=2**-8)
    assert "all-gather" in {c.kind for c in Program.of(compiled, GPUS).collectives}
    change = [
        np.asarray(a) - np.asarray(b) for a, b in zip(jax.tree.leaves(sharded[0]), jax.tree.leaves(alone[0]), strict=True)
    ]
    # A first step moves every element by the learning rate towards a sign, which differs where a gradient is near 0.
    assert max(np.abs(c).max() for c in change) <= 2.1e-3
    assert np.mean([np.mean(np.abs(c) > 1e-4) for c in change]) < 0.1

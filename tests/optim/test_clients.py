"""The state in the hands of others: Flax NNX, `TrainState`, Optax's wrappers, sharding tools, and everything that saves."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coat_jax import coat_adamw, codecs
from coat_jax.optim import checkpoint
from coat_jax.optim.convert import to_adamw
from coat_jax.optim.diagnostics import describe_state, health

CODECS = [codecs.COAT, codecs.LOG_RELATIVE]
TX = {codec is codecs.COAT: coat_adamw(1e-2, codec=codec) for codec in CODECS}


def loss(model):
    return jnp.mean((model(jnp.ones((4, 128))) - 1) ** 2)


def made(codec=codecs.COAT, wrap=lambda tx: tx):
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, wrap(coat_adamw(1e-3, codec=codec)), wrt=nnx.Param)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_nnx_keeps_the_state_and_compiles_once(codec):
    model, optimizer = made(codec)
    first = jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(optimizer))
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(4):
        step(model, optimizer)
    assert len(traces) == 1
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(optimizer)) == first
    kernel = optimizer.opt_state[0].nu.codes["kernel"]
    assert kernel[...].dtype == codec.nu.format.dtype and kernel.shape == (128, 128)
    state = nnx.as_pure(optimizer.opt_state)
    assert "e4m3" in describe_state(state) or "int8" in describe_state(state)
    assert health(nnx.grad(loss)(model), state).dormant < 0.5
    assert to_adamw(state)[0].mu["kernel"].dtype == jnp.float32
    repr(optimizer), copy.deepcopy(optimizer)


def test_nnx_scans_over_steps_and_skips_them():
    (model, optimizer), (again, other) = made(), made()

    @nnx.jit
    def three(model, optimizer):
        @nnx.scan(in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)
        def run(carry):
            model, optimizer = carry
            optimizer.update(model, nnx.grad(loss)(model))
            return carry

        run((model, optimizer))

    @nnx.jit
    def maybe(model, optimizer, go):
        grads = nnx.grad(loss)(model)
        nnx.cond(go, lambda m, o: o.update(m, grads) and None, lambda m, o: None, model, optimizer)

    three(model, optimizer)
    for go in (True, False, True, True):
        maybe(again, other, jnp.array(go))
    same(nnx.state(optimizer), nnx.state(other))


@pytest.mark.parametrize(
    "wrap", [lambda tx: optax.MultiSteps(tx, 2), lambda tx: optax.apply_if_finite(tx, 3)], ids=["multi", "finite"]
)
def test_optax_wrappers_compare_the_state_before_and_after(wrap):
    model, optimizer = made(wrap=wrap)
    before = np.asarray(model.kernel[...])
    for _ in range(4):
        optimizer.update(model, nnx.grad(loss)(model))
    assert not np.array_equal(before, model.kernel[...])


@pytest.mark.parametrize("shape", [(1536, 8960), (896, 4864), (4864, 896), (576, 1536), (2304, 768)])
@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp")])
def test_one_sharding_per_parameter_is_enough(shape, spec):
    """NNX metadata and `nn.get_partition_spec` give scales the sharding of their parameter: eight devices share all of them."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    class Matrix(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(shape, jnp.bfloat16), out_sharding=spec)

    with jax.set_mesh(mesh):
        optimizer = nnx.Optimizer(Matrix(), coat_adamw(1e-3), wrt=nnx.Param)
    for part in ("codes", "scale", "exponent"):
        array = getattr(optimizer.opt_state[0].mu, part)["w"][...]
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), 2), part
    params = {"w": nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.bfloat16), spec)}
    specs = nn.get_partition_spec(jax.eval_shape(coat_adamw(1e-3).init, params))
    assert specs[0].mu.scale["w"] == specs[0].nu.codes["w"] == PartitionSpec(*spec)


def test_params_like_trees_are_found_by_optax():
    params = {"kernel": jnp.ones((256, 128)), "bias": jnp.ones((128,))}
    tx = coat_adamw(1e-3)
    marked = optax.tree.map_params(tx, lambda x: "params", tx.init(params), transform_non_params=lambda x: "other")
    assert set(jax.tree.leaves((marked[0].mu, marked[0].nu))) == {"params"}
    assert marked[0].count == marked[0].codec == "other"


def trained(codec, steps=2):
    params = {"kernel": jax.random.normal(jax.random.key(0), (256, 128)), "bias": jnp.ones((128,))}
    return advance(TrainState.create(apply_fn=None, params=params, tx=TX[codec == codecs.COAT]), steps)


def advance(state, steps):
    step = jax.jit(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.sin, s.params)))
    for _ in range(steps):
        state = step(state)
    return state


def by_msgpack(state, folder):
    return serialization.from_bytes(state, serialization.to_bytes(state))


def by_pickle(state, folder):
    return state.replace(opt_state=pickle.loads(pickle.dumps(state.opt_state)), params=pickle.loads(pickle.dumps(state.params)))


def by_orbax(state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "orbax", state)


def by_this_library(state, folder):
    checkpoint.save(folder / "own", state)
    return checkpoint.restore(folder / "own", state)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("save", [by_msgpack, by_pickle, lambda s, _: copy.deepcopy(s), by_orbax, by_this_library])
def test_a_train_state_that_was_saved_goes_on_as_if_it_never_was(codec, save, tmp_path):
    whole, saved = trained(codec, 4), trained(codec)
    restored = save(saved, tmp_path)
    same(restored.opt_state, saved.opt_state)
    same(advance(restored, 2), whole)


def test_a_state_of_another_codec_is_never_trained_on(tmp_path):
    """Orbax casts codes into the template of another codec without a word. Every update is then NaN; outside jit, an error."""
    e5m2, coat = coat_adamw(1e-2, codec=codecs.COAT_E5M2), coat_adamw(1e-2)
    params = {"kernel": jax.random.normal(jax.random.key(0), (256, 128)), "bias": jnp.ones((128,))}
    _, saved = jax.jit(e5m2.update)(params, e5m2.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "state", coat.init(params))
    assert state[0].nu.codes["kernel"].dtype == jnp.float8_e4m3fn  # was e5m2
    updates, after = jax.jit(coat.update)(params, state, params)
    assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(updates))
    assert int(after[0].codec) == int(saved[0].codec) != int(coat.init(params)[0].codec)
    new, _ = jax.jit(coat.update_and_apply)(params, state, params)
    assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(new))
    with pytest.raises(ValueError, match="belongs to the codec 'coat_e5m2', the optimizer has the codec 'coat'"):
        coat.update(params, state, params)


def test_own_checkpoints_take_python_numbers_and_random_keys(tmp_path):
    state = TrainState.create(apply_fn=None, params={"k": jnp.ones((64, 128))}, tx=TX[True])
    saved = (state, jax.random.key(7))
    checkpoint.save(tmp_path / "new", saved)
    for template in (saved, (state, jax.eval_shape(jax.random.key, 0))):
        restored, key = checkpoint.restore(tmp_path / "new", template)
        assert key.dtype == saved[1].dtype
    assert restored.step == 0 and bool((jax.random.key_data(key) == jax.random.key_data(saved[1])).all())
    same(restored.opt_state, state.opt_state)


def test_folders_that_hold_no_checkpoint_are_said_to(tmp_path):
    checkpoint.save(tmp_path / "cut", {"k": jnp.ones(3)})
    [file] = (f for f in (tmp_path / "cut" / "manifest").iterdir() if "format_version" in f.read_text())
    file.write_text(file.read_text()[:20])
    (tmp_path / "foreign").mkdir()
    for name in ("cut", "foreign"):
        with pytest.raises(ValueError, match=f"{name}' has no readable manifest.*give another checkpoint"):
            checkpoint.restore(tmp_path / name, {"k": jnp.ones(3)})


def test_an_optax_state_restored_by_flax_is_refused():
    params = {"kernel": jnp.ones((64, 128))}
    old, new = optax.adamw(1e-3).init(params), coat_adamw(1e-3).init(params)
    with pytest.raises(ValueError):
        serialization.from_state_dict(new, serialization.to_state_dict(old))

"""Everything that Optax, Flax and JAX wrap around an optimizer works around `coat_adamw`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from coat_jax import coat_adamw, codecs
from coat_jax.optim import STATIC_ARGS

PARAMS = {"kernel": jnp.sin(jnp.arange(64.0 * 128)).reshape(64, 128), "bias": jnp.ones(128)}
OPTIMIZER = coat_adamw(1e-2, b2=0.95)


def gradient(i, params=PARAMS):
    return jax.tree.map(lambda p: jnp.cos(p * (3.0 + i)), params)


def run(optimizer, steps=3, gradient=gradient, params=PARAMS, **extra):
    """Parameters and state after some steps in one scan."""

    @jax.jit
    def all_steps(params):
        def step(carry, i):
            params, state = carry
            updates, state = optimizer.update(gradient(i, params), state, params, **extra)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))[0]

    return all_steps(params)


def close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


@pytest.fixture(scope="module")
def expected():
    return run(OPTIMIZER)[0]


def moved(params):
    return float(jnp.max(jnp.abs(params["kernel"] - PARAMS["kernel"])))


def test_chain_and_extra_arguments(expected):
    chained = optax.chain(optax.clip_by_global_norm(1e9), OPTIMIZER, optax.identity())
    close(run(chained, value=1.0)[0], expected)


def test_masked_and_multi_transform(expected):
    mask = {"kernel": True, "bias": False}
    masked, state = run(optax.masked(OPTIMIZER, mask))
    close(masked["kernel"], expected["kernel"])
    assert state.inner_state[0].mu.codes["kernel"].dtype == jnp.float8_e4m3fn
    both, _ = run(optax.multi_transform({"coat": OPTIMIZER, "none": optax.set_to_zero()}, {"kernel": "coat", "bias": "none"}))
    close(both, {"kernel": expected["kernel"], "bias": PARAMS["bias"]})


def test_inject_hyperparams(expected):
    schedule = optax.constant_schedule(1e-2)
    optimizer = optax.inject_hyperparams(coat_adamw, static_args=STATIC_ARGS)(schedule, b1=0.9, b2=0.95, codec=codecs.COAT)
    params, state = run(optimizer)
    close(params, expected, atol=2e-5)  # betas are float32 arrays here, Python floats there
    assert set(state.hyperparams) >= {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    assert "min_size" not in state.hyperparams


def test_multi_steps(expected):
    params, state = run(
        optax.MultiSteps(OPTIMIZER, 2), steps=6, gradient=lambda i, p: gradient(i // 2, p)
    )  # each gradient twice: their mean is itself
    close(params, expected)
    assert state.inner_opt_state[0].mu.codes["kernel"].dtype == jnp.float8_e4m3fn


def test_apply_if_finite():
    def sometimes(i, params):
        return jax.tree.map(lambda g: jnp.where(i == 1, jnp.nan, g), gradient(jnp.where(i > 1, i - 1, i), params))

    params, state = run(optax.apply_if_finite(OPTIMIZER, 5), steps=4, gradient=sometimes)
    close(params, run(OPTIMIZER)[0])
    assert int(state.total_notfinite) == 1


def test_schedules_of_rate_and_decay():
    schedule = optax.linear_schedule(1e-2, 0.0, 3)
    options = {"learning_rate": schedule, "b2": 0.95, "weight_decay": 0.1}
    mine, state = run(coat_adamw(**options, codec=codecs.FLOAT32))
    jax.tree.map(np.testing.assert_array_equal, mine, run(optax.adamw(**options))[0])
    assert int(state[2].count) == 3


def test_tree_utilities():
    _, state = run(optax.chain(optax.identity(), OPTIMIZER))
    assert int(optax.tree.get(state, "count")) == 3
    assert int(optax.tree.get(optax.tree.set(state, count=jnp.int32(7)), "count")) == 7
    zeros = optax.tree.zeros_like(state)
    assert jax.tree.structure(zeros) == jax.tree.structure(state)


def types(tree):
    """Structure, shapes and dtypes of a tree."""
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def test_shapes_alone_initialise_and_the_state_keeps_its_types():
    abstract = jax.eval_shape(lambda: PARAMS)
    want = jax.eval_shape(OPTIMIZER.init, abstract)
    got = OPTIMIZER.init(abstract)
    assert types(got) == types(want)
    for codec in (codecs.COAT, codecs.LOG_RELATIVE):
        optimizer = coat_adamw(1e-2, codec=codec, master="bf16+8")
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
        state = optimizer.init(params)
        for _, after in (
            jax.eval_shape(optimizer.update, params, state, params),
            jax.eval_shape(optimizer.update_and_apply, params, state, params),
        ):
            assert types(after) == types(state)


def test_the_second_call_does_not_compile():
    step = jax.jit(OPTIMIZER.update_and_apply)
    params, state = PARAMS, OPTIMIZER.init(PARAMS)
    for _ in range(3):
        params, state = step(PARAMS, state, params)
    assert step._cache_size() == 1


def test_train_state(expected):
    state = TrainState.create(apply_fn=lambda: None, params=PARAMS, tx=OPTIMIZER)
    step = jax.jit(lambda state, i: state.apply_gradients(grads=gradient(i, state.params)))
    for i in range(3):
        state = step(state, i)
    close(state.params, expected)


def test_nnx_optimizer():
    model = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((2, 128)))))(model)
        optimizer.update(model, grads)

    before = jnp.copy(model.kernel[...])
    step(model, optimizer)
    step(model, optimizer)
    # Adam's first two steps of one sign are a learning rate each, less weight decay.
    np.testing.assert_allclose(jnp.abs(model.kernel[...] - before), 2e-2, rtol=0.05)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(optimizer))}
    assert "float8_e4m3fn" in dtypes


def test_a_gradient_that_is_not_finite_shows_and_is_forgotten():
    params = {"kernel": jnp.ones((2, 128)), "bias": jnp.ones(4)}
    for codec in (codecs.COAT, codecs.COAT_E5M2, codecs.PLAIN_FP8, codecs.LOG_RELATIVE):
        optimizer = coat_adamw(1e-3, codec=codec, min_size=1)
        update = jax.jit(optimizer.update)
        good = jax.tree.map(lambda p: p * 0.1, params)
        _, state = update(good, optimizer.init(params), params)
        bad = {
            "kernel": good["kernel"].at[0, 0].set(jnp.nan).at[0, 1].set(-jnp.inf).at[0, 2].set(1e30),
            "bias": good["bias"].at[1].set(jnp.inf),
        }
        updates, state = update(bad, state, params)
        assert not np.isfinite(updates["kernel"][0, :2]).any() and not np.isfinite(updates["bias"][1])
        assert np.isfinite(updates["kernel"][0, 3:]).all() and np.isfinite(updates["kernel"][1]).all()
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(state))
        updates, _ = update(good, state, params)
        np.testing.assert_allclose(np.asarray(updates["kernel"]), float(updates["kernel"][1, 5]), rtol=0.4)

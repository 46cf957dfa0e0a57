"""`coat_adamw` stands where `optax.adamw` stood."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import coat_adamw, codecs
from coat_jax.optim import adam_formula

QUANTIZED = [codecs.COAT, codecs.COAT_E5M2, codecs.PLAIN_FP8, codecs.LOG_RELATIVE]


def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embed": jax.random.normal(keys[0], (64, 128)),
        "kernel": jax.random.normal(keys[1], (64, 128)),
        "bias": jnp.zeros(128),
    }
    return params, jax.tree.map(lambda p: p + jax.random.normal(keys[2], p.shape), params)


def train(optimizer, params, target, steps):
    @jax.jit
    def run(params):
        def step(carry, key):
            params, state = carry
            grads = jax.tree.map(lambda p, t: p - t + 0.3 * jax.random.normal(key, p.shape), params, target)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(1), steps)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0]

    return run(params)


def test_float32_is_optax_adamw_bit_for_bit():
    params, target = problem()
    options = {"b2": 0.99, "weight_decay": 0.1}
    mine, _ = train(coat_adamw(1e-2, codec=codecs.FLOAT32, **options), params, target, 20)
    theirs, _ = train(optax.adamw(1e-2, **options), params, target, 20)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize("codec", QUANTIZED)
def test_quantized_training_follows_float32(codec):
    params, target = problem()
    mine, state = train(coat_adamw(1e-2, codec=codec), params, target, 50)
    theirs, _ = train(optax.adamw(1e-2), params, target, 50)
    moved = jnp.linalg.norm(theirs["kernel"] - params["kernel"])
    assert jnp.linalg.norm(mine["kernel"] - theirs["kernel"]) < 0.25 * moved
    np.testing.assert_allclose(mine["bias"], theirs["bias"], rtol=1e-5, atol=1e-6)
    stored = [part["kernel"] for moment in state[0][1:3] for part in moment if part["kernel"] is not None]
    assert sum(x.nbytes for x in stored) <= 2.16 * params["kernel"].size  # groups of 64, which two devices can share


@pytest.mark.parametrize("entry", ["update", "update_and_apply"])
def test_a_step_is_traced_once_for_all_leaves_that_look_alike(entry, monkeypatch):
    """An unrolled model has hundreds of leaves: 40 of one shape, in ten launches of 4 and under 40 names, are traced as one."""
    counted = []
    step = adam_formula.step
    monkeypatch.setattr(adam_formula, "step", lambda *args: counted.append(0) or step(*args))
    for leaves in (4, 40):
        optimizer = coat_adamw(1e-3 * leaves, min_size=1)
        params = {f"layer_{i}": jnp.ones((24, 384)) for i in range(leaves)}
        jax.jit(getattr(optimizer, entry)).lower(params, optimizer.init(params), params)
    assert len(counted) <= 2  # jax 0.10 traces anew between programs

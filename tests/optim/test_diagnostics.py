"""See inside a state, convert it, and which leaves of a large model are quantized."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import coat_adamw, codecs
from coat_jax.models import llama
from coat_jax.optim.convert import from_adamw, to_adamw
from coat_jax.optim.diagnostics import adam_states, describe_state, health, moment_error
from coat_jax.optim.state import is_quantized, viewed

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"kernel": jax.random.normal(KEYS[0], (64, 128)), "bias": jax.random.normal(KEYS[1], (128,))}
GRADS = jax.tree.map(lambda p: 1e-3 * p, PARAMS)


@jax.jit
def exact_steps(params):
    optimizer = optax.adamw(1e-3, b2=0.95)
    state = optimizer.init(params)
    for i in range(4):
        _, state = optimizer.update(jax.tree.map(lambda p, i=i: jnp.cos(p * (2.0 + i)), params), state, params)
    return state


@pytest.mark.parametrize("name,bound", [("coat", 0.04), ("coat_e5m2", 0.04), ("plain_fp8", 0.08), ("log_relative", 0.02)])
def test_adamw_becomes_coat_adamw_and_back(name, bound):
    codec = codecs.named(name)
    exact = exact_steps(PARAMS)
    stored = from_adamw(exact, codec)
    want = jax.eval_shape(coat_adamw(1e-3, b2=0.95, codec=codec).init, PARAMS)
    assert jax.tree.structure(stored) == jax.tree.structure(want)
    back = to_adamw(stored, codec)
    assert jax.tree.structure(back) == jax.tree.structure(exact)
    np.testing.assert_array_equal(back[0].mu["bias"], exact[0].mu["bias"])
    error = moment_error(stored[0], exact[0], codec)
    assert 0 < error.update < bound
    assert 0 < error.mu < bound and 0 < error.nu < 2 * bound


def test_float32_is_not_compared():
    state = coat_adamw(1e-3, codec=codecs.FLOAT32).init(PARAMS)
    with pytest.raises(ValueError, match="no quantized leaf"):
        moment_error(state[0], state[0])


def test_a_state_describes_itself():
    state = optax.chain(optax.clip(1.0), coat_adamw(1e-3)).init(PARAMS)
    text = describe_state(state)
    row = next(line for line in text.splitlines() if "nu/kernel" in line)
    assert row.split() == ["1/0/nu/kernel", "64x128", "e4m3", "PowerExpansion", "64", "-1", "8,832", "47.2%"]
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert text.splitlines()[-1].split() == ["total", f"{total:,}"]


def test_health_sees_what_is_ill():
    optimizer = coat_adamw(1e-3)
    update = jax.jit(optimizer.update)
    _, state = update(GRADS, optimizer.init(PARAMS), PARAMS)
    well = jax.jit(health)(GRADS, state)
    assert well.nonfinite == 0 and well.dormant < 0.02 and 1 / 128 <= well.saturated < 0.1 and 0 < well.octaves < 40
    half = {"kernel": GRADS["kernel"].at[:, ::2].set(0), "bias": GRADS["bias"].at[0].set(jnp.nan)}
    _, state = update(half, optimizer.init(PARAMS), PARAMS)
    ill = health(half, state)
    assert ill.dormant == pytest.approx(0.5, abs=0.01)
    assert ill.nonfinite == pytest.approx(1 / (64 * 128 + 128))
    with pytest.raises(ValueError, match="no CoatAdamState"):
        health(GRADS, optax.adam(1e-3).init(PARAMS))


@pytest.mark.parametrize("codec", [codecs.COAT, codecs.LOG_RELATIVE])
def test_nearly_all_of_llama2_7b_is_quantized(codec):
    model = llama.Llama(llama.preset("llama2-7b", param_dtype=jnp.bfloat16))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    state = jax.eval_shape(coat_adamw(1e-3, codec=codec, master="bf16+8").init, params)
    (adam,) = adam_states(viewed(state, "test"))
    moments = jax.tree.leaves(adam.nu, is_leaf=is_quantized)
    quantized = sum(leaf.size for leaf in moments if is_quantized(leaf))
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert total > 6.7e9 and quantized / total >= 0.97

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    both = jax.tree.leaves((adam.mu, adam.nu), is_leaf=is_quantized)
    stored = size([leaf for leaf in both if is_quantized(leaf)])
    assert stored / quantized <= 2.08
    assert (stored + 3 * quantized) / quantized <= 5.08
    # Embeddings and norms keep 8 bytes of moments: all parameters and all of the state together.
    assert size((params, state)) / total <= 5.2

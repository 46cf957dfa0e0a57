"""The baseline is the model that it is compared with: the same parameters and float32 logits, for every preset."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops, recipes
from coat_jax.models import llama, plain

TOKENS = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)


def count(model):
    params = jax.eval_shape(lambda key: model.init(key, TOKENS)["params"], jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", llama.presets())
def test_as_many_parameters(name):
    config = llama.preset(name)
    assert count(plain.Llama(config)) == count(llama.Llama(config, recipes.bf16()))


def test_olmo_1b_has_the_parameters_of_the_real_one():
    assert count(plain.Llama(llama.preset("olmo-1b"))) == 1_176_764_416


def moved(ours, like):
    """Our parameters in the layout of the baseline, whose layers name their products without attention and mlp."""
    layers = dict(ours["layers"])
    layers |= layers.pop("attention") | layers.pop("mlp")
    made = ours | {"layers": layers}
    assert jax.tree.structure(made) == jax.tree.structure(like)
    return made


OPTIONS = {
    "wide heads": {"head_dim": 16},
    "biases": {"qkv_bias": True, "o_bias": True},
    "norms of heads": {"qk_norm": True, "head_dim": 12},
    "slow rotation": {"rope_scaling": ops.Llama3Scaling(8.0, 1.0, 4.0, 4)},
}


@pytest.mark.parametrize("name", [*llama.presets(), *OPTIONS])
def test_the_same_logits_and_weighted_loss_in_float32(name):
    config = llama.preset("tiny", **OPTIONS[name]) if name in OPTIONS else llama.preset(name)
    heads = 4 if config.kv_heads == config.heads else 2
    small = {"vocab_size": 64, "hidden": 32, "intermediate": 48, "layers": 2, "heads": 4, "kv_heads": heads}
    small |= {"head_dim": config.head_dim and min(config.head_dim, 16)}
    config = dataclasses.replace(config, dtype=jnp.float32, **small)
    ours, baseline = llama.Llama(config, recipes.bf16()), plain.Llama(config)
    params = jax.jit(lambda key: ours.init(key, TOKENS)["params"])(jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.02 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)  # biases of 0 hide
    same = moved(params, jax.eval_shape(lambda: baseline.init(jax.random.key(1), TOKENS)["params"]))
    want = jax.jit(lambda p: ours.apply({"params": p}, TOKENS))(params)
    got = jax.jit(lambda p: baseline.apply({"params": p}, TOKENS))(same)
    # Some 60 roundings of 2^-24 in each of two layers, of logits of size 1.
    np.testing.assert_allclose(got, want, atol=1e-5)
    weights = jnp.arange(18.0).reshape(2, 9) % 3
    losses = [m.apply({"params": p}, TOKENS, TOKENS, weights, method=m.loss) for m, p in ((ours, params), (baseline, same))]
    np.testing.assert_allclose(*losses, rtol=1e-5)

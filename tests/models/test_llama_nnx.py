"""The NNX Llama is the Linen one, bit for bit, and trains in an NNX program."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx.traversals import flatten_mapping

from coat_jax import recipes
from coat_jax.models import llama, llama_nnx
from coat_jax.optim import coat_adamw

CONFIG = dataclasses.replace(llama.preset("tiny"), layers=2, hidden=64, intermediate=128, qk_norm=True, qkv_bias=True)
TOKENS = jax.random.randint(jax.random.key(0), (2, 17), 0, 256)


def test_with_the_parameters_of_the_linen_model_it_gives_its_bits():
    linen = llama.Llama(CONFIG, recipes.lean())
    params = linen.init(jax.random.key(1), TOKENS)["params"]
    model = llama_nnx.Llama(CONFIG, recipes.lean(), params=params)
    assert {p: v.shape for p, v in nnx.to_flat_state(nnx.state(model))} == {
        p: v.shape for p, v in flatten_mapping(params).items()
    }
    wanted = jax.jit(jax.value_and_grad(lambda p: linen.apply({"params": p}, TOKENS[:, :-1], TOKENS[:, 1:], method=linen.loss)))
    loss, grads = nnx.jit(nnx.value_and_grad(lambda m: m.loss(TOKENS[:, :-1], TOKENS[:, 1:])))(model)
    value, grad = wanted(params)
    assert float(loss) == float(value)
    for path, var in nnx.to_flat_state(grads):
        assert bool((var[...] == flatten_mapping(grad)[path]).all()), path
    assert bool((model(TOKENS) == linen.apply({"params": params}, TOKENS)).all())


def test_it_trains_in_one_trace_with_moments_in_fp8():
    traces = []
    model = llama_nnx.Llama(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        traces.append(0)
        loss, grads = nnx.value_and_grad(lambda m: m.loss(tokens[:, :-1], tokens[:, 1:]))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, TOKENS)) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0] and len(traces) == 1
    assert optimizer.opt_state[0].mu.codes["layers"]["mlp"]["up"]["kernel"].dtype == jnp.float8_e4m3fn


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=re.escape("neither params nor rngs")):
        llama_nnx.Llama(CONFIG)
    with pytest.raises(TypeError, match="recipe='lean' is not a Recipe"):
        llama_nnx.Llama(CONFIG, "lean", rngs=nnx.Rngs(0))

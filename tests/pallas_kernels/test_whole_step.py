"""A training step with every kernel that model and optimizer have, interpreted: plain JAX's, bit for bit."""

import jax
import jax.numpy as jnp
from interpreting import interpreted, same_bytes

from coat_jax import coat_adamw, recipes
from coat_jax.models import llama

CONFIG = llama.preset("tiny", hidden=128, intermediate=128, layers=1, heads=2, kv_heads=1, vocab_size=32)
# Else XLA leaves out the rounding of the residual stream to bf16 where the next norm reads it, which no kernel can do.
ROUNDED = {"xla_allow_excess_precision": False}


@interpreted
def test_an_interpreted_step_is_that_of_plain_jax():
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, CONFIG.vocab_size)
    params = llama.Llama(CONFIG).init(jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = coat_adamw(1e-3, min_size=128 * 128).init(params)

    def step(implementation):
        model = llama.Llama(CONFIG, recipes.coat().replace(implementation=implementation))
        optimizer = coat_adamw(1e-3, min_size=128 * 128, implementation=implementation)

        def run(params, state):
            loss = lambda p: model.apply({"params": p}, tokens[:, :-1], tokens[:, 1:], method=model.loss)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(params)
            return value, grads, optimizer.update_and_apply(grads, state, params)

        return jax.jit(run, compiler_options=ROUNDED)(params, state)

    same_bytes(step("interpret"), step("xla"))

"""A model of three small functions, for steps that need no Llama."""

import jax
import jax.numpy as jnp

from coat_jax.fused_step.layered_model import LayeredModel

VOCAB, WIDTH, LAYERS = 32, 128, 3


def params(key=0, tied=False, dtype=jnp.float32, layers=LAYERS):
    keys = jax.random.split(jax.random.key(key), 4)
    outer = {"embed": jax.random.normal(keys[0], (VOCAB, WIDTH), dtype), "norm": jnp.ones((WIDTH,), dtype)}
    if not tied:
        outer["head"] = jax.random.normal(keys[1], (WIDTH, VOCAB), dtype) * 0.1
    rows = {
        "up": jax.random.normal(keys[2], (layers, WIDTH, WIDTH), dtype) * 0.1,
        "norm": jnp.ones((layers, WIDTH), dtype),
    }
    return {**outer, "layers": rows}


def rms(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w


def embed(outer, batch):
    return outer["embed"][batch[:, :-1]]


def layer(row, x, batch):
    return x + jnp.tanh(rms(x, row["norm"]) @ row["up"])


def loss(outer, x, batch):
    head = outer["head"] if "head" in outer else outer["embed"].T
    logits = (rms(x, outer["norm"]) @ head).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1)
    return -jnp.mean(picked)


PARTS = LayeredModel(embed, layer, loss)


def batch(step=0, rows=8, length=9):
    return jax.random.randint(jax.random.key(1000 + step), (rows, length), 0, VOCAB)

"""FP8 activations in the program that XLA compiles for an H100: what crosses, what is multiplied, how much it wants.

Bytes are XLA's plan. U is two bytes for every feature of the residual stream, per token and layer.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from coat_jax import coat_adamw, ops, recipes
from coat_jax.compiled import compile_for
from coat_jax.models import llama, plain

pytestmark = [pytest.mark.plan, pytest.mark.xdist_group("activations")]  # one process: they share compiled programs
GIB = 2**30
CONFIG = llama.preset("llama2-7b", param_dtype=jnp.bfloat16)
SEQ = 2048


def model_of(arm):
    if arm in ("plain", "dots"):
        return plain.Llama(CONFIG, plain.Remat.DOTS if arm == "dots" else plain.Remat.NONE, attention="cudnn")
    return llama.Llama(CONFIG, recipes.named(arm.split()[0]), remat="layer" if arm.endswith("layer") else None)


@functools.cache
def gradients(arm, batch):
    """The loss and all gradients of Llama-2-7B, compiled."""
    model = model_of(arm)
    tokens = jax.ShapeDtypeStruct((batch, SEQ), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"], jax.random.key(0))
    loss = lambda p, x, y: model.apply({"params": p}, x, y, method=model.loss)  # noqa: E731
    return compile_for("h100", jax.value_and_grad(loss), params, tokens, tokens)


def kept_in_u(program, batch):
    return sum(k.nbytes for k in program.kept) / (batch * SEQ * CONFIG.layers * 2 * CONFIG.hidden)


def test_bytes_kept_per_token_and_layer():
    kept = {arm: kept_in_u(gradients(arm, 1), 1) for arm in ("coat", "lean", "lean layer", "plain", "dots")}
    assert kept["coat"] <= 12.2
    assert kept["lean"] <= 5.6
    assert kept["lean layer"] <= 0.6
    assert kept["lean"] < 0.5 * kept["dots"] < kept["plain"]


@pytest.mark.parametrize(("recipe", "batch"), [("coat", 1), ("lean", 1), ("lean", 4)])
def test_fp8_wants_no_more_temporaries_than_bf16(recipe, batch):
    assert gradients(recipe, batch).temp_bytes <= gradients("bf16", batch).temp_bytes


@pytest.mark.parametrize("batch", [1, 4])
def test_every_weight_product_of_a_layer_is_fp8_however_small(batch):
    """Seven weights, three products of each: forward, input gradient, weight gradient."""
    assert gradients("lean", batch).count("f8") == 21


BATCH = 4


@functools.cache
def lean_step(implementation):
    """The training step of Llama-2-7B with lean activations and COAT moments, compiled."""
    model = llama.Llama(CONFIG, recipes.lean().replace(implementation=implementation))
    optimizer = coat_adamw(1e-4, b2=0.95, implementation=implementation)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"], jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, x, y):
        loss = lambda p: model.apply({"params": p}, x, y, method=model.loss)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        return *optimizer.update_and_apply(grads, state, params), value

    return compile_for("h100", step, params, state, tokens, tokens, donate_argnums=(0, 1))


def test_step_with_lean_activations_and_coat_moments_fits():
    program = lean_step(None)
    assert program.peak_bytes <= 51 * GIB
    assert program.count("f8") >= 21  # seven products of a layer, and two gradients of each
    others = [p.name for p in program.products if p.kind not in ("f8", "attention", "attention backward")]
    assert others  # the output head's
    assert all("head_loss" in name for name in others)
    assert program.count("attention") == 2  # forward, and again in the backward pass
    assert kept_in_u(program, BATCH) <= 5.6


def test_kernels_that_the_library_chooses_want_no_more_memory_than_xla():
    assert "elementwise" in lean_step(None).text and "mosaic_gpu" not in lean_step("xla").text
    assert lean_step(None).peak_bytes <= lean_step("xla").peak_bytes


LAYERS, ROWS, WIDTH = 4, 256, 512


def in_heads(x):
    return x.reshape(1, ROWS, 4, 128)


# Each op once in a layer, x -> x.
OPS = {
    "linear": lambda x, w, r: ops.linear([x], [w], r)[0],
    "rms_norm": lambda x, w, r: ops.rms_norm(x, w[0], r),
    "layer_norm": lambda x, w, r: ops.layer_norm(x, w[0], w[1], r),
    "silu": lambda x, w, r: ops.silu(x, r),
    "gelu": lambda x, w, r: ops.gelu(x, r),
    "swiglu": lambda x, w, r: ops.swiglu(x, ops.rope(in_heads(x)).reshape(x.shape), r),
    "multiply": lambda x, w, r: ops.multiply(x, ops.rope(in_heads(x)).reshape(x.shape), r),
    "attention": lambda x, w, r: ops.attention_linear(*[in_heads(x)] * 3, [w], r)[0][0],
}


def test_fp8_crosses_from_forward_to_backward_for_each_op():
    """All ops one after another in a scan over layers: each keeps FP8 and its scales, and none an array in bf16."""

    def layer(x, w):
        for name, op in OPS.items():
            with jax.named_scope(name):
                x = x + op(x, w, recipes.lean())
        return x, None

    def loss(x, ws):
        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    ws = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    program = compile_for("h100", jax.grad(loss, (0, 1)), x, ws)
    for name in OPS:
        assert any(k.fp8 for k in program.kept if name in k.name.split("/")), name
    fp8 = sum(k.nbytes for k in program.kept if k.fp8)
    assert fp8 == LAYERS * ROWS * WIDTH * 10  # swiglu and multiply have two inputs; q, k and v here are one array
    # Groups of 128 have a scale of two bytes; the scales of the two norms are rows of a parameter.
    assert sum(k.nbytes for k in program.kept) - fp8 <= fp8 * 2 / 128 + LAYERS * 4 * WIDTH * 2

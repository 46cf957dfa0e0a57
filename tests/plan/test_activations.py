"""FP8 activations in the program that XLA compiles for an H100: what crosses, what is multiplied, how much it wants.

Bytes are XLA's plan. U is two bytes for every feature of the residual stream, per token and layer.
"""

import contextlib
import functools
import io
import json

import jax
import jax.numpy as jnp
import pytest

from coat_jax import cli, coat_adamw, ops, recipes
from coat_jax.compiled import compile_for
from coat_jax.models import llama, plain
from coat_jax.plan.step import PlannedStep

pytestmark = [pytest.mark.plan, pytest.mark.xdist_group("activations")]  # one process: they share compiled programs
GIB = 2**30
CONFIG = llama.preset("llama2-7b", param_dtype=jnp.bfloat16)
SEQ = 2048


def model_of(name):
    if name == "dots":
        return plain.Llama(CONFIG, plain.Remat.DOTS, attention="cudnn")
    return llama.Llama(CONFIG, recipes.named(name.split()[0]), remat="layer" if name.endswith("layer") else None)


@functools.cache
def gradients(name, batch):
    """The loss and all gradients of Llama-2-7B, compiled."""
    model = model_of(name)
    tokens = jax.ShapeDtypeStruct((batch, SEQ), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"], jax.random.key(0))
    loss = lambda p, x, y: model.apply({"params": p}, x, y, method=model.loss)  # noqa: E731
    return compile_for("h100", jax.value_and_grad(loss), params, tokens, tokens)


def kept_in_u(program, batch):
    return sum(k.nbytes for k in program.kept) / (batch * SEQ * CONFIG.layers * 2 * CONFIG.hidden)


def test_bytes_kept_per_token_and_layer():
    kept = {name: kept_in_u(gradients(name, 1), 1) for name in ("coat", "lean", "lean layer", "dots")}
    assert kept["coat"] <= 12.2
    assert kept["lean"] <= 5.6
    assert kept["lean layer"] <= 0.6
    assert kept["lean"] < 0.5 * kept["dots"]


@pytest.mark.parametrize(("recipe", "batch"), [("coat", 1), ("lean", 1), ("lean", 4)])
def test_fp8_wants_no_more_temporaries_than_bf16(recipe, batch):
    assert gradients(recipe, batch).temp_bytes <= gradients("bf16", batch).temp_bytes


@pytest.mark.parametrize("batch", [1, 4])
def test_every_weight_product_of_a_layer_is_fp8_however_small(batch):
    """Seven weights, three products of each: forward, input gradient, weight gradient."""
    assert gradients("lean", batch).count("f8") == 21


BATCH = 4


@functools.cache
def planned():
    """The row of `coat-jax plan` for the training step with lean activations and COAT moments, and its program."""
    programs, compiled, said = [], PlannedStep.compile, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(PlannedStep, "compile", lambda self, setting: programs.append(compiled(self, setting)) or programs[-1])
        command = f"plan llama2-7b --batch {BATCH} --seq {SEQ} --recipe lean --codec coat --json -"
        assert cli.main(command.split()) == 0
    [row] = json.loads(said.getvalue())["rows"]
    return row, programs[0]


def test_step_with_lean_activations_and_coat_moments_fits():
    row, program = planned()
    assert row["peak_bytes"] == program.peak_bytes <= 51 * GIB and row["fits"]
    # Seven products of a layer, and two gradients of each; in bf16 only the output head's three.
    assert row["products"]["f8"] == program.count("f8") == 21
    assert row["products"]["bf16"] == 3 and "f32" not in row["products"]
    others = [p.name for p in program.products if p.kind not in ("f8", "attention", "attention backward")]
    assert others
    assert all("head_loss" in name for name in others)
    assert program.count("attention") == 2  # forward, and again in the backward pass
    assert row["recomputed"] < 0.02  # that attention alone
    assert kept_in_u(program, BATCH) <= 5.6
    assert row["kept_bytes"] == sum(kept.nbytes for kept in program.kept)


def test_kernels_that_the_library_chooses_want_no_more_memory_than_xla():
    model = llama.Llama(CONFIG, recipes.lean().replace(implementation="xla"))
    optimizer = coat_adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, implementation="xla")
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"], jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, x, y):
        loss = lambda p: model.apply({"params": p}, x, y, method=model.loss)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        return *optimizer.update_and_apply(grads, state, params), value

    xla = compile_for("h100", step, params, state, tokens, tokens, donate_argnums=(0, 1))
    _, chosen = planned()
    assert "elementwise" in chosen.text and "mosaic_gpu" not in xla.text
    assert chosen.peak_bytes <= xla.peak_bytes


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

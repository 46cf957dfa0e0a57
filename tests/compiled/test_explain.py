"""`explain_memory`: what it lists is what the program keeps, in a scan or unrolled, of a loss or of a whole step."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import explain_memory, recipes
from coat_jax.models import llama

BATCH, TOKENS = 2, 64


@pytest.fixture(scope="module")
def reports():
    config = llama.preset("tiny", layers=3)
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    found = {}
    for name in ("bf16", "lean"):
        model = llama.Llama(config, recipes.named(name))
        params = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])

        def loss(params, tokens, model=model):
            return model.apply({"params": params}, tokens, tokens, method=model.loss)

        found[name] = explain_memory(loss, params, tokens)
    return config, found


def test_lean_keeps_in_fp8_what_its_recipe_names_and_bf16_keeps_no_fp8(reports):
    # Inputs of both norms, q, gate and up; k and v narrower by heads / kv_heads: one byte per element of each.
    config, found = reports
    width = 3 * config.hidden + 2 * config.kv_heads * config.head_width + 2 * config.intermediate
    assert found["lean"].fp8_bytes == width * BATCH * TOKENS * config.layers
    assert found["bf16"].fp8_bytes == 0
    assert found["lean"].nbytes < found["bf16"].nbytes / 4


def test_the_table_has_a_row_per_array_and_totals_in_mib(reports):
    _, found = reports
    lines = repr(found["lean"]).splitlines()
    assert len(lines) == len(found["lean"].kept) + 6
    assert lines[0].split()[-2:] == ["layers", "MiB"]
    assert float(lines[-3].split()[-1]) == pytest.approx(found["lean"].fp8_bytes / 2**20, abs=0.005)
    assert len({len(line) for line in lines}) == 1


def test_unrolled_layers_are_told_apart_by_their_names():
    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    report = explain_memory(loss, [jnp.ones((64, 64))] * 3, jnp.ones((8, 64)))
    assert {k.name.split("/")[0] for k in report.kept} == {"layer0", "layer1", "layer2"}
    assert all(k.layers == 1 and k.nbytes == 8 * 64 * 4 for k in report.kept)


def test_a_step_that_differentiates_by_itself_is_read_as_it_is():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - grad, value

    w, x = jnp.ones((4, 16, 16)), jnp.ones((8, 16))
    assert explain_memory(step, w, x).nbytes == explain_memory(loss, w, x).nbytes


def test_a_loss_with_aux_is_read_as_the_loss_and_a_step_that_returns_a_loss_first_as_a_step():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def with_aux(w, x):
        return loss(w, x), {"predictions": x @ w}

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return value, w - grad

    args = jnp.ones((64, 64)), jnp.ones((32, 64))
    kept = explain_memory(loss, *args).nbytes
    assert kept >= 32 * 64 * 4  # tanh of the product
    assert explain_memory(with_aux, *args).nbytes >= kept
    assert explain_memory(step, *args).nbytes == kept


def test_what_has_no_loss_and_no_backward_pass_is_refused():
    for fn in (lambda w: w * 2, lambda w: {"loss": jnp.sum(w), "n": 1}, lambda w: (jnp.sum(w), w, w), lambda w: None):
        with pytest.raises(ValueError, match="give a loss that returns one floating-point number or .loss, aux."):
            explain_memory(fn, jnp.ones((4,)))

"""What the fused step needs on one H100, as XLA compiles it for Llama-2-7B at sequence 2048 with `lean()` and COAT moments."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import recipes
from coat_jax.compiled import compile_for
from coat_jax.fused_step.llama import layered_llama
from coat_jax.fused_step.step import fused_step
from coat_jax.models import llama
from coat_jax.optim import coat_adamw

GIB = 2**30
LAYERS = 32


@pytest.mark.plan
@pytest.mark.parametrize(("batch", "peak_gib"), [(4, 40), (12, 66)])
def test_a_7b_model_trains_within(batch, peak_gib):
    model = llama.Llama(llama.preset("llama2-7b", param_dtype=jnp.bfloat16), recipes.lean())
    step = fused_step(layered_llama(model), coat_adamw(1e-4))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
    state = jax.eval_shape(step.init, params)
    tokens = jax.ShapeDtypeStruct((batch, 2049), jnp.int32)
    program = compile_for("h100", step, params, state, tokens, donate_argnums=(0, 1))
    assert program.peak_bytes <= peak_gib * GIB
    # Parameters and state are updated in place; what is new is the metrics.
    assert program.argument_bytes - program.alias_bytes < 2**20
    # Seven products forward and fourteen backward, all in FP8: the trace that rebuilds a layer's residuals leaves none behind.
    assert program.count("f8") == 21
    # One byte per kept element: the inputs of both norms, q, k, v, gate and up, and bf16 scales in groups of 128.
    elements = batch * 2048 * (5 * 4096 + 2 * 11008)
    assert sum(kept.nbytes for kept in program.kept) == LAYERS * elements * (1 + 2 / 128)

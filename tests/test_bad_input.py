"""Bad input to the library: one line that names the argument, the value and what would do."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax import E4M3, FP8Dense, PerBlock, PerGroup, QuantSpec, codecs, ops, quantize, recipes
from coat_jax.models import llama

CASES = {
    "integers to quantize": (
        lambda: quantize(jnp.arange(4), QuantSpec(E4M3, PerGroup(4))),
        TypeError,
        "int32",
        "cast it first",
    ),
    "group of zero": (lambda: PerGroup(0), ValueError, "size=0", "use 1 or more"),
    "block of zero": (lambda: PerBlock((0, 128)), ValueError, "block=(0, 128)", "must be 1 or more"),
    "axis that is not there": (
        lambda: quantize(jnp.ones(4), QuantSpec(E4M3, PerGroup(4, -2))),
        ValueError,
        "axis=-2",
        "use -1",
    ),
    "unknown implementation": (
        lambda: quantize(jnp.ones(4), QuantSpec(E4M3, PerGroup(4)), implementation="triton"),
        ValueError,
        "implementation='triton'",
        "'xla'",
    ),
    "empty implementation": (
        lambda: quantize(jnp.ones(4), QuantSpec(E4M3, PerGroup(4)), implementation=""),
        ValueError,
        "implementation=''",
        "'xla'",
    ),
    "unknown recipe": (lambda: recipes.named("fp4"), ValueError, "'fp4'", "coat, lean"),
    "name of a recipe": (
        lambda: FP8Dense(4, recipe="coat"),
        TypeError,
        "FP8Dense: recipe='coat'",
        "recipes.coat()",
    ),
    "an array for a list of inputs": (
        lambda: ops.linear(jnp.ones((1, 8)), [jnp.ones((8, 4))], recipes.coat()),
        TypeError,
        "linear: inputs is an array of shape (1, 8)",
        "use a list",
    ),
    "an array for a list of kernels": (
        lambda: ops.linear([jnp.ones((2, 8))], jnp.ones((8, 8)), recipes.bf16()),
        TypeError,
        "linear: kernels is an array of shape (8, 8)",
        "use a list",
    ),
    "an array for the kernels of attention": (
        lambda: ops.attention_linear(*[jnp.ones((1, 4, 2, 8))] * 3, jnp.ones((2, 8, 4)), recipes.coat()),
        TypeError,
        "attention_linear: kernels is an array of shape (2, 8, 4)",
        "use a list",
    ),
    "two inputs without a prologue": (
        lambda: ops.linear([jnp.ones((2, 8))] * 2, [jnp.ones((8, 8))], recipes.coat()),
        ValueError,
        "linear: 2 inputs",
        "use one",
    ),
    "unknown codec": (lambda: codecs.named("fp4"), ValueError, "'fp4'", "coat"),
    "unknown preset": (lambda: llama.preset("huge"), ValueError, "'huge'", "tiny"),
    "no layers": (lambda: llama.preset("tiny", layers=0), ValueError, "layers=0", "use 1 or more"),
    "heads that do not divide": (lambda: llama.preset("tiny", heads=5), ValueError, "heads=5", "even width"),
}


@pytest.mark.parametrize(("call", "kind", "names", "advice"), CASES.values(), ids=CASES)
def test_message_is_one_line_that_names_and_advises(call, kind, names, advice):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and names in message and advice in message


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "silu", "gelu", "swiglu", "multiply", "linear", "attention_linear"])
def test_kernels_that_cannot_run_are_refused_in_a_forward_pass_too(name):
    """On a CPU, jitted or not, with or without gradients: nobody gets plain XLA who asked for kernels."""
    recipe = recipes.blocks().replace(implementation="pallas")
    x, w, heads = (
        jnp.ones((128, 1024), jnp.bfloat16),
        jnp.ones((1024, 128), jnp.bfloat16),
        jnp.ones((1, 128, 8, 128), jnp.bfloat16),
    )
    call = {
        "rms_norm": lambda x: ops.rms_norm(x, None, recipe),
        "layer_norm": lambda x: ops.layer_norm(x, None, None, recipe),
        "silu": lambda x: ops.silu(x, recipe),
        "gelu": lambda x: ops.gelu(x, recipe),
        "swiglu": lambda x: ops.swiglu(x, x, recipe),
        "multiply": lambda x: ops.multiply(x, x, recipe),
        "linear": lambda x: ops.linear([x], [w], recipe)[0],
        "attention_linear": lambda x: ops.attention_linear(heads, heads, heads, [jnp.ones((1024, 64))], recipe)[0],
    }[name]
    for run in (call, jax.jit(call), jax.grad(lambda x: call(x).astype(jnp.float32).sum())):
        called = "(quantize|linear)" if name == "attention_linear" else name  # of q, k and v, or the product behind them
        with pytest.raises(ValueError, match=f"{called}: implementation='pallas' runs in programs for one Hopper GPU"):
            run(x)

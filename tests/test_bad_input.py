"""Bad input to the library: one line that names the argument, the value and what would do."""

import jax.numpy as jnp
import pytest

from coat_jax import E4M3, FP8Dense, PerBlock, PerGroup, QuantSpec, codecs, quantize, recipes
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

"""The two programs of the front page, before and after its diff, compiled for an H100.

python tests/support/front_page.py        writes results/front_page.json
"""

import json
import os
from typing import Any

# Before JAX starts: its CUDA plug-in, of which only the compiler is used, else looks for a driver and does not load.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import pages

from coat_jax.compiled.devices import GIB
from coat_jax.plan import compile_for
from coat_jax.plan.command import PACKAGES
from coat_jax.results import compact, provenance

SIZES = {"vocabulary": 32_000, "width": 2048, "layers": 16, "heads": 16, "intermediate": 5504}
BATCH, SEQ = 8, 2048
QUICKSTART = pages.ROOT / "docs" / "quickstart.md"
RESULT = pages.ROOT / "results" / "front_page.json"


def diff() -> str:
    """The diff of the front page."""
    [found] = pages.blocks(pages.README.read_text(), "diff")
    return found


def sources() -> dict[str, str]:
    """The quick start's program (its plain block and its language model), and the same with the diff applied."""
    block, before, *_ = pages.blocks(QUICKSTART.read_text(), "python")
    return {"before": block + before, "after": block + pages.apply_diff(diff(), before)}


def compiled(source: str) -> dict[str, Any]:
    """A program as it is printed, its step compiled for an H100 at `SIZES`, parameters and state donated.

    `test_code_runs` runs the rest of it, the steps.
    """
    names: dict[str, Any] = {}
    exec(source[: source.index("\ntokens = ")], names)
    model = names["LanguageModel"](**SIZES)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
    state = jax.eval_shape(names["optimizer"].init, params)
    names["model"], names["ATTENTION"] = model, "cudnn"  # as on a machine with a GPU
    program = compile_for("h100", names["step"], params, state, tokens, donate_argnums=(0, 1))
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "peak_bytes": program.peak_bytes,
        "argument_bytes": program.argument_bytes,
        "fp8_products": program.count("f8"),
    }


if __name__ == "__main__":
    rows = {name: compiled(source) for name, source in sources().items()}
    document = provenance("python tests/support/front_page.py", PACKAGES)
    RESULT.write_text(compact(document | {"sizes": SIZES, "batch": BATCH, "sequence": SEQ, "rows": rows}))
    print(json.dumps({name: row["peak_bytes"] / GIB for name, row in rows.items()}))

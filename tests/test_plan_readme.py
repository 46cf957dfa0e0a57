"""Every planned figure of the README is that of a committed JSON, and the committed plans keep the library's promises."""

import json
import re
from pathlib import Path

import pytest

from coat_jax.plan import markdown
from coat_jax.plan.devices import GIB

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TABLES = {"results/plan_llama2_7b.json": markdown.frontier, "results/plan_paper.json": markdown.papers_table}


@pytest.mark.parametrize("path", TABLES)
def test_tables_are_those_of_the_results(path):
    document = json.loads((ROOT / path).read_text())
    [body] = re.findall(rf"<!-- plan: {path} -->\n(.*?)<!-- end -->", README, re.DOTALL)
    assert body.strip() == TABLES[path](document)
    assert {"command", "date", "versions"} <= set(document)
    assert document["command"] in README.replace("\n", " ")


def peaks(path):
    rows = json.loads((ROOT / path).read_text())["rows"]
    return {
        (markdown.setting_of(row).label, row["gpus"]): row["peak_bytes"] / GIB for row in rows if row["model"] == "llama2-7b"
    }


def test_the_committed_plan_of_a_7b_model_keeps_its_promises():
    found = {label: peak for (label, _), peak in peaks("results/plan_llama2_7b.json").items()}
    # Independent figures for the same model: 109.5 and 74.8 GiB.
    assert 105 <= found["BF16, optax.adamw"] <= 112 and 72 <= found["BF16, optax.adamw, dots policy"] <= 77
    assert found["lean, coat moments"] <= 51 and found["lean, coat moments, fused"] <= 40


def test_on_four_gpus_lean_needs_two_fifths_of_plain_bf16():
    found = peaks("results/plan_paper.json")
    lean = found["lean, coat moments", 4]
    assert lean <= 0.42 * found["BF16, optax.adamw", 4] and lean <= 0.70 * found["BF16, optax.adamw, dots policy", 4]

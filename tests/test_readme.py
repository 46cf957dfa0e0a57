"""The README tells the truth: its example runs, its figures are those of the committed results, its links lead somewhere."""

import dataclasses
import json
import re
from pathlib import Path

import figures
import jax
import pytest

from coat_jax.compiled.devices import GIB
from coat_jax.plan import paper

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    """Code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_example_runs_and_its_state_is_fp8():
    [code] = blocks("python")
    statements = [line for line in code.splitlines() if line.strip()]
    assert len(statements) <= 16  # fifteen and a class line: short enough to be read
    names = {}
    exec(code, names)
    bytes_of = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    kernels = sum(leaf.size for leaf in jax.tree.leaves(names["params"]) if leaf.ndim > 1)
    assert float(names["loss"]) > 0
    assert bytes_of(names["state"]) < 2.2 * kernels


def test_blocks_are_those_of_the_results():
    """`python tests/figures.py` makes them again."""
    assert figures.rendered(README) == README
    assert re.findall(r"<!-- figures: (\w+) -->", README) == list(figures.BLOCKS)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path):
    results = json.loads(path.read_text())
    assert {"command", "date", "versions"} <= set(results)
    assert f"results/{path.name}" in README
    assert results["command"] in README.replace("\n", " ")


# What the text between the blocks may name without a measurement behind it.
SETTINGS = {
    *("2410.19313", "3.11", "2.0", "1", "2"),  # the paper, Python, the license, headings and numbered things
    *("4", "128", "2048", "4,096", "8", "64", "500", "2e-3", "150", "5", "0.95", "0.999", "0", "0.5"),  # shapes and settings
    *("79.1", "10", "2,000", "32", "40"),  # the H100's memory, a bound, steps, a block of Blackwell's formats, RTX 40
}


def test_every_other_number_of_the_text_is_a_setting():
    text = re.sub(r"<!-- figures.*?<!-- end -->|```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", README, flags=re.DOTALL)
    numbers = re.findall(r"(?<![\w.])\d[\d,.]*(?:e-?\d+)?(?![\w])", text)
    assert {number.rstrip(".,") for number in numbers} - SETTINGS == set()


def test_there_is_a_measured_table_and_it_keeps_the_promises():
    results = json.loads((ROOT / "results" / "compare.json").read_text())
    variants, plain = results["variants"], results["plain_flax_kept_bytes"]
    assert results["settings"]["steps"] >= 300
    for name in ("coat", "lean"):
        assert variants[name]["validation_loss"] < 2.1 and variants["bf16"]["validation_loss"] < 2.1
        assert variants[name]["validation_loss"] <= 1.01 * variants["bf16"]["validation_loss"]
        assert variants[name]["kept_bytes"] <= 0.45 * plain
        assert variants[name]["optimizer_state"]["bytes_per_quantized_parameter"] <= 2.08


def peaks(name):
    rows = [row for row in figures.load(name)["rows"] if row["model"] == "llama2-7b"]
    return {(figures.setting_of(row).label, row["gpus"]): row["peak_bytes"] / GIB for row in rows}


def test_the_committed_plan_of_a_7b_model_keeps_its_promises():
    found = {label: peak for (label, _), peak in peaks("plan_llama2_7b").items()}
    # Independent figures for the same model: 109.5 and 74.8 GiB.
    assert 105 <= found["BF16, optax.adamw"] <= 112 and 72 <= found["BF16, optax.adamw, dots policy"] <= 77
    assert found["lean, coat moments"] <= 51 and found["lean, coat moments, fused"] <= 40


def test_on_four_gpus_lean_needs_two_fifths_of_plain_bf16():
    found = peaks("plan_paper")
    lean = found["lean, coat moments", 4]
    assert lean <= 0.42 * found["BF16, optax.adamw", 4] and lean <= 0.70 * found["BF16, optax.adamw, dots policy", 4]


def test_the_papers_table_is_complete_and_states_the_largest_batch_on_one_gpu():
    rows = figures.load("plan_paper")["rows"]
    assert {paper.key(row) for row in rows} == {paper.key(dataclasses.asdict(setting)) for setting in paper.settings()}
    assert all(row["error"] is None for row in rows)
    assert all(row["largest_batch"] is not None for row in rows if row["gpus"] == 1)


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_folders_of_the_layout_exist():
    layout = README.split("## Layout")[1].split("##")[0]
    for name in re.findall(r"`([\w./]+/|coat_jax/[\w./]+)`", layout):
        assert (ROOT / name).exists(), name

"""The README tells the truth: its example runs, its figures are those of the committed results, its links lead somewhere."""

import json
import re
from pathlib import Path

import jax
import pytest

from coat_jax.train import report

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


@pytest.mark.parametrize(("path", "body"), re.findall(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", README, re.DOTALL))
def test_tables_are_those_of_the_results(path, body):
    results = json.loads((ROOT / path).read_text())
    assert body.strip() == report.markdown(results)
    assert {"command", "date", "versions"} <= set(results)
    assert results["command"] in README.replace("\n", " ")


def test_there_is_a_measured_table_and_it_keeps_the_promises():
    results = json.loads((ROOT / "results" / "compare.json").read_text())
    arms, plain = results["arms"], results["plain_flax_kept_bytes"]
    assert results["settings"]["steps"] >= 300
    for name in ("coat", "lean"):
        assert arms[name]["validation_loss"] < 2.1 and arms["bf16"]["validation_loss"] < 2.1
        assert arms[name]["validation_loss"] <= 1.01 * arms["bf16"]["validation_loss"]
        assert arms[name]["kept_bytes"] <= 0.45 * plain
        assert arms[name]["optimizer_state"]["bytes_per_quantized_parameter"] <= 2.08
    assert "<!-- table: results/compare.json -->" in README


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_folders_of_the_layout_exist():
    layout = README.split("## Layout")[1].split("##")[0]
    for name in re.findall(r"`([\w./]+/|coat_jax/[\w./]+)`", layout):
        assert (ROOT / name).exists(), name

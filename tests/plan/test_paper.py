"""The paper's table: every cell once, continued where a run stopped, and shown with the published figures."""

import io
import json

import pytest
from rich.console import Console

from coat_jax import cli
from coat_jax.compiled import devices
from coat_jax.plan import command, paper, row
from coat_jax.plan.row import PlanRow


def test_an_interrupted_run_is_continued_and_cells_are_not_planned_twice(monkeypatch, tmp_path):
    planned = []

    def plan(setting):
        planned.append(setting)
        if len(planned) == 7:
            raise KeyboardInterrupt
        return PlanRow(setting, peak_bytes=len(planned) * devices.GIB)

    monkeypatch.setattr(row, "plan", plan)
    path = tmp_path / "paper.json"
    with pytest.raises(KeyboardInterrupt):
        paper.run(path, output=command.PlanOutput(), typed="x", fit=False)
    assert len(json.loads(path.read_text())["rows"]) == 6
    document = paper.run(path, output=command.PlanOutput(), typed="x", fit=False)
    cells = list(paper.settings())
    assert len(document["rows"]) == len(cells) == len(set(cells))
    assert len(planned) == len(cells) + 1  # the interrupted one twice


def test_the_table_shows_our_peaks_beside_the_published_ones():
    rows = [PlanRow(s, peak_bytes=12 * devices.GIB).to_json() for s in paper.settings()]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(paper.table(rows))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["llama2-7b", "4", *["12.0"] * 5, "55.1", "35.6"] in lines
    assert ["llama-30b", "8", *["12.0"] * 5, "out", "70.5"] in lines


def test_a_file_that_is_something_else_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("[1, 2]")
    assert cli.main(["plan", "--table", "paper", "--json", str(path)]) == 2
    assert "holds something else than results of this command" in capsys.readouterr().err and path.read_text() == "[1, 2]"
    assert cli.main(["plan", "--table", "paper"]) == 2

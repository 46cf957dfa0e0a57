"""The static table of the kernels: that it is printed and written, and that the recorded one has every kernel."""

import json
import pathlib

import pytest

from coat_jax.bench import compiled as static
from coat_jax.bench import kernels as cases


@pytest.mark.plan
def test_a_row_is_printed_and_written(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    [row] = static.run(only="dequantize, e4m3, group 16", json=str(file))
    assert "not measured" in " ".join(capsys.readouterr().out.split())
    assert json.loads(file.read_text())["rows"][0]["registers"] == row.registers


def test_the_recorded_table_has_every_kernel_within_5_percent_of_the_least_without_spills():
    recorded = json.loads((pathlib.Path(__file__).parents[2] / "results" / "kernels_static.json").read_text())["rows"]
    assert [row["name"] for row in recorded] == [case.name for case in cases.cases()]
    for row, case in zip(recorded, cases.cases(), strict=True):
        assert row["spills"] == 0 and row["registers"] > 0
        assert row["wgmma"] if case.flops else row["least"] <= row["moved"] <= 1.05 * row["least"]

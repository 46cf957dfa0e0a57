"""The static table of the kernels: what it says of one, and that it has them all."""

import json
import pathlib

import pytest

from coat_jax.plan import bench


@pytest.mark.plan
def test_a_kernel_moves_the_least_and_spills_nothing(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    [row] = bench.run(only="dequantize, e4m3, group 16", json=str(file))
    assert row.least <= row.moved <= 1.05 * row.least
    assert 0 < row.registers < 256 and row.spills == 0 and row.temporaries == 0
    assert "not measured" in " ".join(capsys.readouterr().out.split())
    assert json.loads(file.read_text())["rows"][0]["registers"] == row.registers


def test_the_recorded_table_has_every_kernel_within_5_percent_of_the_least_without_spills():
    recorded = json.loads((pathlib.Path(__file__).parents[1] / "results" / "kernels_static.json").read_text())["rows"]
    assert [row["name"] for row in recorded] == [case.name for case in bench.cases()]
    for row in recorded:
        assert row["least"] <= row["moved"] <= 1.05 * row["least"]
        assert row["spills"] == 0 and row["registers"] > 0 and row["temporaries"] < 4096

"""The static table of the kernels: that it is printed and written."""

import json

import pytest

from coat_jax.bench import compiled as static


@pytest.mark.plan
def test_a_row_is_printed_and_written(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    [row] = static.run(only="dequantize, e4m3, group 16", json=str(file))
    assert "not measured" in " ".join(capsys.readouterr().out.split())
    assert json.loads(file.read_text())["rows"][0]["registers"] == row.registers

"""The codec table in short: random gradients, one run of the small Llama, and bad arguments."""

import json

import figures
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.studies import codec_errors, codec_study, codec_table
from coat_jax.studies.variants import StudyConfig
from coat_jax.train import data as text


@pytest.mark.parametrize("name,worst", [("coat", 0.08), ("log_relative", 0.03)])
def test_random_gradients(name, worst):
    # 300 steps are too few for a drop to fade at b2 = 0.999; errors and dormant elements are what they are after 2,000.
    found = codec_errors.measure(codecs.named(name), groups=2, sigmas=(1.0,), last=300)
    assert found["one_shot"][0] < worst / 2
    assert found["closed_loop"]["0.95"][0] < worst
    assert found["dormant"]["passed"]


def test_a_run_of_the_small_llama_and_its_moments():
    settings = StudyConfig(steps=4, batch=2, seq=16, validation_batches=2)
    study = codec_study.Study(settings, text.load(seed=0))
    steps = []
    row, state = study.run(study.trainer(codecs.FLOAT32), 0, perturbed=True, advance=lambda: steps.append(1))
    assert len(steps) == 4
    assert 0 < row["validation_loss"] < np.log(256) + 0.5
    real = codec_study.real_moments(state)
    assert real["mean_squared_error_plain_fp8_over_coat"] > 1
    assert real["relative_error"]["log_relative"]["update"] < real["relative_error"]["coat"]["update"] < 0.1


def test_bytes_of_the_codecs():
    assert codec_study.bytes_per_parameter(codecs.COAT) == 2 + 2 * 5 / 128
    assert codec_study.bytes_per_parameter(codecs.LOG_RELATIVE) == 2 + 9 / 128
    assert codec_study.bytes_per_parameter(codecs.FLOAT32) == 8


def test_more_seeds_add_to_a_file_and_other_settings_leave_it_alone(tmp_path, monkeypatch):
    """The committed file as one of this machine: nothing is left to measure but the seeds that are new."""
    path = tmp_path / "codecs.json"
    held = figures.load("codecs")
    settings = StudyConfig(**{name: value for name, value in held["settings"].items() if name not in ("arms", "variants")})
    header = codec_table.report.header(settings, text.load(seed=0, least_bytes=1000), "typed")
    path.write_text(json.dumps(held | header))
    trained = []

    def run(study, trainer, seed, *, perturbed, advance):
        trained.append(seed)
        return {"validation_loss": 2.0, "training_loss": 2.0, "seconds": 1.0}, None

    monkeypatch.setattr(codec_table.Study, "run", run)
    quiet = codec_table.Console(quiet=True)
    kept = {name: list(row["runs"]) for name, row in held["codecs"].items()}
    arguments = {"groups": held["groups"], "last": held["last"], "out": tmp_path, "console": quiet}
    found = codec_table.run(settings, seeds=held["seeds"] + 1, **arguments)
    assert trained == [held["seeds"]] * len(kept)
    assert {name: row["runs"][:-1] for name, row in found["codecs"].items()} == kept
    found = codec_table.run(settings, seeds=2, **arguments)  # fewer take none away
    assert found["seeds"] == held["seeds"] + 1 and len(trained) == len(kept)
    before = path.read_text()
    with pytest.raises(ValueError, match=r"\(groups: 16 there, 8 now\)"):
        codec_table.run(settings, **arguments | {"groups": 8})
    assert path.read_text() == before


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="seeds=1; use 2 or more"):
        codec_table.run(StudyConfig(), seeds=1, out=tmp_path)
    with pytest.raises(ValueError, match="groups=0; use 1 or more"):
        codec_table.run(StudyConfig(), groups=0, out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        codec_table.run(StudyConfig(), out=tmp_path / "file")

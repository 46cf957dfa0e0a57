"""The study of recipes: what it writes and what it does not repeat."""

import json

import pytest
from rich.console import Console

from coat_jax.studies import recipe_study
from coat_jax.studies.variants import StudyConfig

QUIET = Console(quiet=True)


def test_a_run_is_written_and_continued(tmp_path):
    corpus, out = tmp_path / "text", tmp_path / "recipes.json"
    corpus.mkdir()
    for i in range(8):
        (corpus / f"{i}.txt").write_text(f"page {i}: the quick brown fox jumps over the lazy dog\n" * 40)
    settings = StudyConfig(variants=("bf16",), steps=2, batch=2, seq=16, validation_batches=1)
    first = recipe_study.run(settings, seeds=1, data=(corpus,), out=out, console=QUIET)
    assert json.loads(out.read_text()) == first
    [loss] = first["variants"]["bf16"]["validation_loss"].values()
    assert 0 < loss < 8  # log2 of 256 values, in bits; nats are fewer
    # What the file holds for these settings stands: a loss written into it comes back, and nothing is trained.
    first["variants"]["bf16"]["validation_loss"]["0"] = 1.5
    out.write_text(json.dumps(first))
    assert recipe_study.run(settings, seeds=1, data=(corpus,), out=out, console=QUIET)["variants"]["bf16"]["mean"] == 1.5


@pytest.fixture
def counted(monkeypatch):
    """A study whose runs take no time; gives the (variant, seed) of each run that was made."""
    made = []

    class Trainer:
        def __init__(self, name, batch):
            self.name = name

    def loss(trainer, settings, seed, data):
        made.append((trainer.name, seed))
        return 2.0 + seed

    monkeypatch.setattr(recipe_study, "build", lambda settings, name: name)
    monkeypatch.setattr(recipe_study, "Trainer", Trainer)
    monkeypatch.setattr(recipe_study, "validation_loss", loss)
    monkeypatch.setattr(recipe_study, "kept_bytes", lambda trainer, settings: 1.0)
    return made


def test_more_variants_and_seeds_add_to_a_file_and_other_settings_leave_it_alone(tmp_path, counted):
    out = tmp_path / "new" / "recipes.json"

    def run(variants, seeds, steps=2):
        settings = StudyConfig(variants=variants, steps=steps, batch=2, seq=16)
        return recipe_study.run(settings, seeds=seeds, out=out, console=QUIET)

    run(("bf16",), 3)
    run(("bf16", "coat"), 1)
    run(("lean",), 2)
    expected = [("bf16", 0), ("bf16", 1), ("bf16", 2), ("coat", 0), ("lean", 0), ("lean", 1)]
    assert counted == expected
    held = json.loads(out.read_text())
    seeds = {name: list(variant["validation_loss"]) for name, variant in held["variants"].items()}
    assert seeds == {"bf16": ["0", "1", "2"], "coat": ["0"], "lean": ["0", "1"]}
    assert held["settings"]["variants"] == ["bf16", "coat", "lean"]
    with pytest.raises(ValueError, match=r"holds results of another run \(settings, steps: 2 there, 3 now\)"):
        run(("bf16",), 3, steps=3)
    held["versions"]["jax"] = "0.1"
    out.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"\(versions, jax: 0.1 there"):
        run(("bf16",), 3)
    assert json.loads(out.read_text()) == held and counted == expected


def test_a_run_is_written_before_anything_is_read_of_its_program(tmp_path, counted, monkeypatch):
    def interrupted(trainer, settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe_study, "kept_bytes", interrupted)
    out = tmp_path / "recipes.json"
    with pytest.raises(KeyboardInterrupt):
        recipe_study.run(StudyConfig(variants=("bf16",)), seeds=1, out=out, console=QUIET)
    assert json.loads(out.read_text())["variants"]["bf16"]["validation_loss"] == {"0": 2.0}


def test_differences_are_paired_by_seed():
    losses = {"bf16": {"0": 2.0, "1": 1.0}, "lean": {"0": 2.02, "1": 1.0}}
    results = {"variants": {name: {"validation_loss": by_seed} for name, by_seed in losses.items()}}
    recipe_study.summarise(results, ("bf16", "lean"))
    above = results["variants"]["lean"]["above_first_percent"]
    assert (above["mean"], above["least"], above["most"]) == pytest.approx((0.5, 0.0, 1.0))


def test_no_seeds_are_refused_by_name():
    with pytest.raises(ValueError, match="seeds=0; use 1 or more"):
        recipe_study.run(StudyConfig(), seeds=0, console=QUIET)

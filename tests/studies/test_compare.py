"""`coat-jax compare`: a short run end to end, what it writes, and what it says when something is wrong."""

import contextlib
import io
import json

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest
from rich.console import Console

from coat_jax.cli import main
from coat_jax.studies import accounting, compare, report
from coat_jax.studies.variants import build
from coat_jax.train.loop import DivergedError, Variant

SHORT = {"steps": 4, "batch": 2, "seq": 32, "validation_batches": 2}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run of four steps, the folder that it wrote and the text that it printed."""
    out = tmp_path_factory.mktemp("short")
    console = Console(record=True, width=80, file=io.StringIO())
    results = compare.run(compare.StudyConfig(**SHORT), out=out, console=console)
    return results, out, console.export_text()


def test_json_holds_every_number_and_where_it_comes_from(short):
    results, out, _ = short
    assert json.loads((out / report.JSON_NAME).read_text()) == json.loads(json.dumps(results))
    assert {"command", "date", "versions", "settings", "corpus", "plain_flax_kept_bytes"} <= set(results)
    assert {"python", "coat-jax", "jax", "flax", "optax"} <= set(results["versions"])
    for variant in results["variants"].values():
        assert len(variant["losses"]) == len(variant["step_seconds"]) == 4
        assert variant["validation_loss"] < variant["losses"][0] < 8.0  # 5.5 is the entropy of a uniform byte
        assert variant["seconds_per_step"] > 0


def test_fp8_state_and_kept_bytes_are_what_the_paper_promises(short):
    results, _, _ = short
    bf16, coat = results["variants"]["bf16"], results["variants"]["coat"]
    assert bf16["optimizer_state"]["bytes_per_parameter"] == 8.0
    # Two bytes of codes, and for each group of 64 or 96 two f32 scales and two exponents of one byte: at most 2 + 10 / 64. (Of
    # 128, 2.08 bytes, where an axis has 1024 elements: `test_bytes_of_the_codecs`.)
    assert coat["optimizer_state"]["bytes_per_quantized_parameter"] <= 2.16
    assert any("embed" in name for name in coat["optimizer_state"]["f32_leaves"])
    assert coat["kept_bytes"] <= 0.45 * results["plain_flax_kept_bytes"]
    # The baseline is the leaner of the two: our BF16 variant keeps what `nn.RMSNorm` keeps, some f32 more than the baseline.
    assert 1.0 <= bf16["kept_bytes"] / results["plain_flax_kept_bytes"] <= 1.25


def test_table_shows_the_numbers_of_the_json(short):
    results, _, printed = short
    for variant in results["variants"].values():
        for text in (f"{variant['validation_loss']:.4f}", f"{variant['training_loss']:.4f}", f"{variant['kept_bytes']:,.0f}"):
            assert text in printed
    ratio = results["variants"]["coat"]["validation_loss"] / results["variants"]["bf16"]["validation_loss"]
    assert f"{100 * (ratio - 1):+.2f} %" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_picture_shows_every_arm(short):
    results, out, _ = short
    image = matplotlib.image.imread(out / report.PNG_NAME)
    assert image.shape[0] > 600 and image.shape[1] > 900 and image.std() > 0.05
    figure = report.plot(results)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert [label.split(",")[0] for label in labels] == ["bf16", "coat"]
    assert all(axes.get_ylabel() for axes in figure.axes) and "step" in figure.axes[-1].get_xlabel()


def test_same_seed_same_numbers(short, tmp_path, monkeypatch):
    results, _, _ = short
    monkeypatch.setattr(compare, "_account", lambda *_: None)
    monkeypatch.setattr(report, "table", lambda _: "")
    monkeypatch.setattr(report, "notes", lambda _: [])
    again = compare.run(compare.StudyConfig(**SHORT, variants=("coat",)), out=tmp_path, console=Console(quiet=True))
    for key in ("losses", "validation_loss"):
        assert again["variants"]["coat"][key] == results["variants"]["coat"][key]


def test_kept_bytes_leave_out_attention_matrices_and_nothing_else():
    def kept(*shape):
        return accounting.Residual("x", "bf16", shape, 4, 0)

    sizes = {"batch": 8, "seq": 128, "heads": 4}
    assert accounting.is_attention_matrix(kept(1, 8, 4, 128, 128), **sizes)
    assert not accounting.is_attention_matrix(kept(8, 128, 128), **sizes)  # activations where hidden = seq
    assert not accounting.is_attention_matrix(kept(1, 8, 4, 128, 1), **sizes)


def test_smooth_is_a_trailing_mean():
    np.testing.assert_allclose(report.smooth([1.0, 2.0, 3.0, 7.0], 2), [1.0, 1.5, 2.5, 5.0])


@pytest.fixture
def diverging(monkeypatch):
    """Variants whose loss is NaN in the third step of the one called coat: a weight, the loss, that falls by one each step."""

    def build(settings, name):
        def loss(w, batch):
            return jnp.where((name == "coat") & (w < 8.5), jnp.nan, w)

        return Variant(name, lambda key: jnp.full((), 10.0), loss, optax.sgd(1.0))

    monkeypatch.setattr(compare, "build", build)


def test_nan_stops_the_run_and_writes_what_was_measured(diverging, tmp_path):
    with pytest.raises(DivergedError, match="variant coat: the loss is nan at step 3"):
        compare.run(compare.StudyConfig(**SHORT), out=tmp_path, console=Console(quiet=True))
    written = json.loads((tmp_path / report.JSON_NAME).read_text())
    assert written["diverged"] == {"variant": "coat", "step": 3, "loss": "nan"}
    assert written["variants"]["coat"]["losses"] == [10.0, 9.0]
    assert written["variants"]["bf16"]["losses"] == [10.0, 9.0, 8.0]
    assert (tmp_path / report.PNG_NAME).exists()


@pytest.fixture
def easy(monkeypatch):
    """Variants whose loss is a weight that falls by a hundredth each step, and whose programs nobody reads."""

    def build(settings, name):
        return Variant(name, lambda key: jnp.full((), 10.0), lambda w, batch: w, optax.sgd(0.01))

    def account(trainers, settings, results, shape):
        results["plain_flax_kept_bytes"] = 1.0

    monkeypatch.setattr(compare, "build", build)
    monkeypatch.setattr(compare, "_account", account)
    for name in ("table", "notes"):
        monkeypatch.setattr(report, name, lambda _: "")


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_comparison_stands_until_a_new_one_holds_as_much(easy, tmp_path, monkeypatch):
    command = ["compare", "--batch", "2", "--seq", "16", "--out", str(tmp_path)]
    assert main([*command, "--steps", "6"]) == 0
    written = (tmp_path / report.JSON_NAME).read_text()
    for place in ("_train", "_account"):
        with monkeypatch.context() as patched:
            patched.setattr(compare, place, interrupt)
            assert main([*command, "--steps", "6"]) == 130
        assert (tmp_path / report.JSON_NAME).read_text() == written
    assert main([*command, "--steps", "7"]) == 2
    assert (tmp_path / report.JSON_NAME).read_text() == written
    assert main([*command, "--steps", "6"]) == 0
    held = json.loads((tmp_path / report.JSON_NAME).read_text())
    assert held["variants"]["coat"]["losses"] == json.loads(written)["variants"]["coat"]["losses"] and "date" in held


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no such program")])
def test_losses_are_written_before_programs_are_read(easy, tmp_path, monkeypatch, error):
    def fails(*_):
        written = json.loads((tmp_path / report.JSON_NAME).read_text())["variants"]["coat"]
        assert written["validation_loss"] == pytest.approx(10.0 - 4 * 0.01, rel=1e-6)
        raise error

    monkeypatch.setattr(compare, "_account", fails)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        compare.run(compare.StudyConfig(**SHORT), out=tmp_path, console=Console(quiet=True))
    assert len(json.loads((tmp_path / report.JSON_NAME).read_text())["variants"]["bf16"]["losses"]) == 4


def test_what_is_measured_is_written_where_standard_output_takes_nothing(easy, tmp_path):
    full = open("/dev/full", "w", encoding="utf-8", buffering=1)  # noqa: SIM115  (closing it fails as well)
    with pytest.raises(OSError, match="No space"):
        compare.run(compare.StudyConfig(**SHORT), out=tmp_path, console=Console(file=full))
    with contextlib.suppress(OSError):
        full.close()
    losses = json.loads((tmp_path / report.JSON_NAME).read_text())["variants"]["bf16"]["losses"]
    assert 0 < len(losses) <= 4


def test_interrupt_writes_what_was_measured(diverging, tmp_path, monkeypatch):
    def batches(self, batch, seed):
        yield from [np.zeros((8, 129), np.int32)] * 2
        raise KeyboardInterrupt

    monkeypatch.setattr(compare.text.Windows, "batches", batches)
    assert main(["compare", "--steps", "4", "--out", str(tmp_path)]) == 130
    assert json.loads((tmp_path / report.JSON_NAME).read_text())["variants"]["bf16"]["losses"] == [10.0, 9.0]


def test_nan_is_one_line_and_status_one(diverging, tmp_path, capsys):
    assert main(["compare", "--steps", "4", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "coat-jax: variant coat: the loss is nan at step 3; try a lower learning rate or another seed"
    ]


def test_fused_trains_every_arm_inside_the_backward_pass(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(compare, "run", lambda settings, **_: seen.append(settings))
    assert main(["compare", "--fused", "--variants", "bf16,lean", "--out", str(tmp_path)]) == 0
    assert seen[0].variants == ("bf16+fused", "lean+fused")
    fused, ordinary = (build(seen[0], name) for name in ("lean+fused", "lean"))
    assert fused.fused is not None and ordinary.fused is None and fused.name == "lean+fused"

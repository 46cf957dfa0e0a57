"""Bad input on the command line: one line that names the argument, the value and what would do; status 2; no traceback."""

import subprocess
import sys

import pytest

from coat_jax.cli import main
from coat_jax.studies import accounting


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an empty folder, a file that is too small and a file in the way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "small").mkdir()
    for name in ("a", "b"):
        (tmp_path / "small" / name).write_text(name)
    (tmp_path / "file").write_text("text")
    return tmp_path


BAD = {
    "negative steps": (["--steps", "-1"], "steps=-1", "use 1 or more"),
    "no steps": (["--steps", "0"], "steps=0", "use 1 or more"),
    "steps that are no number": (["--steps", "many"], "--steps", "valid integer"),
    "empty batch": (["--batch", "0"], "batch=0", "use 1 or more"),
    "sequence of one": (["--seq", "1"], "seq=1", "use 2 or more"),
    "learning rate of zero": (["--learning-rate", "0"], "learning_rate=0.0", "use a positive one"),
    "negative seed": (["--seed", "-3"], "seed=-3", "use 0 or more"),
    "unknown preset": (["--preset", "huge"], "preset='huge'", "tiny"),
    "unknown variant": (["--variants", "bf16,int4"], "variant 'int4'", "bf16, coat, lean"),
    "variant named twice": (["--variants", "coat,coat"], "'coat,coat'", "each variant once"),
    "missing corpus": (["--data", "nowhere"], "'nowhere' does not exist", "give text files"),
    "second path missing": (["--data", "small", "nowhere"], "'nowhere' does not exist", "give text files"),
    "empty corpus": (["--data", "empty"], "no file in empty", "give text files"),
    "one file": (["--data", "file"], "file has 1", "give 2 or more"),
    "too small a corpus": (["--data", "small"], "1 bytes for training in small", "one batch needs 1025"),
    "batch larger than the text": (["--batch", "1000000"], "standard library", "one batch needs"),
    "out is a file": (["--out", "file"], "out='file'", "name a folder"),
    "unknown option": (["--epochs", "3"], "No such option", "--epochs"),
}


@pytest.mark.parametrize(("arguments", "names", "advice"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_two(here, capsys, arguments, names, advice):
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("coat-jax: ") and names in lines[0] and advice in lines[0]
    assert printed.out == ""
    assert not (here / "out").exists()


def test_model_that_does_not_fit_is_refused_before_it_is_made(here, capsys, monkeypatch):
    monkeypatch.setattr(accounting, "memory", lambda: 2**20)
    assert main(["compare"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "preset='tiny' needs 0.0 GiB for parameters and moments of 2 variants" in line and "use a smaller preset" in line


def test_unknown_and_missing_commands(capsys):
    assert main(["comprae"]) == 2
    assert "comprae" in capsys.readouterr().err
    assert main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_traceback_shows_where_an_error_came_from():
    with pytest.raises(ValueError, match="steps=-1"):
        main(["--traceback", "compare", "--steps", "-1"])


def test_help_names_every_option(capsys):
    assert main(["compare", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in ("--steps", "--batch", "--seq", "--preset", "--seed", "--data", "--out", "--variants"):
        assert option in printed


def test_status_reaches_the_shell(here):
    done = subprocess.run(
        [sys.executable, "-m", "coat_jax.cli", "compare", "--steps", "-1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "steps=-1" in done.stderr

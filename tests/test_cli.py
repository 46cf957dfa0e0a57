"""The command line can be trusted with anything: one line that names the argument and what would do, status 2, nothing lost."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys

import pytest
import user_program

import coat_jax
from coat_jax import cli, results
from coat_jax.bench import compiled as static
from coat_jax.cli import main
from coat_jax.interrupts import heeded
from coat_jax.plan import row
from coat_jax.studies import accounting, codec_table, compare, recipe_study

ORIGIN = {"command": "coat-jax", "date": "2020-01-01", "versions": {}}
DEEP = "[" * 100_000
FILES = {
    "file": "text",
    "foreign.json": '{"rows": [{"name": "mine"}]}',
    "list.json": "[1, 2]",
    "cut.json": json.dumps(ORIGIN | {"rows": []})[:-9],
    "deep.json": DEEP,
    "bytes.json": b"\xff\xfe\x00",
    "plan.json": json.dumps(ORIGIN | {"rows": [{"model": "tiny"}]}),
    "recipes.json": json.dumps(ORIGIN | {"settings": {"variants": ["bf16"]}, "variants": {"bf16": {"validation_loss": {}}}}),
    "device.json": '{"name": "mine"}',
    "photo.png": b"\x89PNG mine",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an empty folder, text that is too small, text that is not, and files that hold something else."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "small", "text", "taken", "taken_codecs"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / "small" / name).write_text(name)
        (tmp_path / "text" / name).write_text(f"{name}: the quick brown fox jumps over the lazy dog\n" * 100)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "taken" / "compare.json").write_text(FILES["foreign.json"])
    (tmp_path / "taken_codecs" / "codecs.json").write_text(FILES["cut.json"])
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    return tmp_path


@pytest.fixture
def no_work(monkeypatch):
    """What would take long fails the test: bad input is refused before it."""

    def begun(*_, **__):
        raise AssertionError("the work began")

    for module, name in ((compare, "Trainer"), (recipe_study, "Trainer"), (row, "plan"), (static, "compiled")):
        monkeypatch.setattr(module, name, begun)
    for name in ("_errors", "_runs"):
        monkeypatch.setattr(codec_table, name, begun)


def tree(folder):
    """Every file below a folder and what it holds."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Options by command and kind, and values that none of them takes.
STUDY = ["--data", "text", "--batch", "2", "--seq", "16"]
COUNTS = {
    "compare": ("steps", "batch", "seq", "seed"),
    "recipes": ("seeds", "steps", "batch", "seq"),
    "codecs": ("seeds", "steps", "batch", "seq", "groups"),
    "plan tiny": ("gpus", "batch", "seq"),
}
NO_COUNT = {"word": "many", "negative": "-3", "fraction": "1.5", "empty": "", "nan": "nan", "inf": "inf", "huge": "9" * 400}
REALS = {"compare": ("learning-rate",), "recipes": ("learning-rate",), "plan tiny": ("reserve",), "bench": ("budget",)}
NO_REAL = {"word": "much", "negative": "-1", "empty": "", "nan": "nan", "minus inf": "-inf"}
JSON_FILES = ("", "empty", "absent/x.json", "file/x.json", "/proc/x.json", "/dev/full", "/dev/zero", "zero.json", "x" * 300)
JSON_FILES += ("file", "foreign.json", "list.json", "cut.json", "deep.json", "bytes.json", "device.json")
VALUES = {
    "compare --variants": ("", "int4", "bf16,int4", "coat,coat", "bf16,", "+fused"),
    "compare --preset": ("", "huge"),
    "compare --data": ("nowhere", "empty", "file", "small", "/dev/zero", "x" * 300),
    "compare --out": ("file", "file/out", "/proc/out", "/dev/full", "taken", "x" * 300),
    "compare --learning-rate": ("0", "inf", "1e400"),
    "compare --seed": (str(2**32),),
    "compare": ("--epochs=3", "--fused=1", "--steps", "nowhere"),
    "recipes --variants": ("", "int4", "coat,coat"),
    "recipes --preset": ("huge",),
    "recipes --data": ("nowhere", "empty", "file", "small"),
    "recipes --out": ("empty", "/dev/full", "/dev/zero", "file/x.json", "/proc/x/y.json", *JSON_FILES[9:], "plan.json"),
    "recipes --seeds": ("0", str(10**6)),
    "codecs --data": ("nowhere", "empty", "file", "small"),
    "codecs --out": ("file", "file/out", "/proc/out", "/dev/full", "taken_codecs"),
    "codecs --groups": ("0", "5000"),
    "codecs --seeds": ("1",),
    "plan": ("llama9", "", "--gpus=1", "--batch"),
    "plan tiny": ("extra", "--gpus=65", "--fused=yes"),
    "plan tiny --device": ("a100", "", "absent.json", "device.json", "list.json", "deep.json", "bytes.json", "zero.json"),
    "plan tiny --recipe": ("fp4", ""),
    "plan tiny --codec": ("none", ""),
    "plan tiny --master": ("bf16+9", ""),
    "plan tiny --remat": ("some", "", "dots"),
    "plan tiny --reserve": ("inf", "1e400"),
    "plan tiny --json": (*JSON_FILES, "plan.json", "recipes.json"),
    "plan tiny --plot": ("", "x.txt", "empty", "absent/x.png", "/dev/full", "photo.png", "-"),
    "plan --table": ("", "papers", "paper"),
    "plan --table paper --json": ("-", *JSON_FILES, "plan.json"),
    "bench --only": ("AdamX",),
    "bench --json": (*JSON_FILES, "recipes.json"),
    "bench --calibrate": ("x.json", "x.txt", "-", "empty", "/dev/full", "device.json", "foreign.json"),
    "bench --budget": ("0",),
    "doctor": ("extra", "--json=yes", "--slow"),
    "": ("comprae", "--steps=1", "-1", ""),
}


def calls():
    """Every call of the table, and the name of what is wrong with it."""
    for options, values in ((COUNTS, NO_COUNT), (REALS, NO_REAL)):
        for command, names in options.items():
            study = STUDY if command in ("compare", "recipes", "codecs") else []
            for name in names:
                yield from ([*command.split(), *study, f"--{name}={value}"] for value in values.values())
    for command, values in VALUES.items():
        *words, last = [*command.split(), ""] if "--" not in command else command.split()
        study = STUDY if command.split(" ")[0] in ("compare", "recipes", "codecs") and "--data" not in command else []
        for value in values:
            yield [*words[:1], *study, *words[1:], *([f"{last}={value}"] if last.startswith("--") else [value])]


CALLS = list(calls())


def test_the_table_is_long_and_names_every_option():
    from coat_jax import commands

    assert len(CALLS) >= 150 and len({tuple(call) for call in CALLS}) == len(CALLS)
    named = {word.split("=")[0] for call in CALLS for word in call if word.startswith("--")}
    shown = set()
    for command in commands.app.registered_commands:
        for parameter in command.callback.__annotations__.values():
            for option in getattr(parameter, "__metadata__", ()):
                shown |= {name for name in getattr(option, "param_decls", None) or () if name.startswith("--")}
    assert shown - named <= {"--arms", "--compare", "--fit", "--quick", "--fused"}  # switches and an alias


@pytest.mark.parametrize("command", sorted({call[0] if call else "" for call in CALLS}))
def test_bad_input_is_one_line_and_status_two_and_no_file_changes(here, no_work, capsys, command):
    before = tree(here)
    wrong = []
    for call in CALLS:
        if call[0] != command:
            continue
        try:
            status = main(call)
        except BaseException as error:  # the table is shown whole
            wrong.append((call, repr(error)[:200]))
            continue
        printed = capsys.readouterr()
        lines = printed.err.splitlines()
        if status != 2 or len(lines) != 1 or not lines[0].startswith("coat-jax: ") or printed.out:
            wrong.append((call, status, printed.out[:200], lines[:3]))
        if tree(here) != before:
            wrong.append((call, "changed a file"))
            before = tree(here)
    assert not wrong, "\n".join(map(str, wrong))


BAD = {
    "negative steps": (["--steps", "-1"], "steps=-1", "use 1 or more"),
    "steps that are no number": (["--steps", "many"], "--steps", "valid integer"),
    "more steps than an optimizer counts": (["--steps", str(2**31)], f"steps={2**31}", "use 1000000000 at most"),
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
    "out holds something else": (["--out", "taken", *STUDY], "taken/compare.json'", "it stands, give another file"),
    "unknown option": (["--epochs", "3"], "No such option", "--epochs"),
}


@pytest.mark.parametrize(("arguments", "names", "advice"), BAD.values(), ids=BAD)
def test_the_line_names_the_argument_and_says_what_would_do(here, no_work, capsys, arguments, names, advice):
    assert main(["compare", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("coat-jax: ") and names in line and advice in line
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


def test_help_names_every_option_and_how_long_the_compiler_takes(capsys):
    assert main(["compare", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in ("--steps", "--batch", "--seq", "--preset", "--seed", "--data", "--out", "--variants"):
        assert option in printed
    for command, words in (("plan", "seconds on two cores"), ("doctor", "about a minute")):
        assert main([command, "--help"]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


def test_version_is_the_installed_one(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"coat-jax {coat_jax.__version__}\n"
    assert coat_jax.__version__ == importlib.metadata.version("coat-jax")


def full():
    """A file that takes no byte."""
    return open("/dev/full", "w", encoding="utf-8")


def closed():
    """The end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", encoding="utf-8")


@pytest.mark.parametrize("output", [full, closed])
@pytest.mark.parametrize(
    "call", [["--help"], ["--version"], ["doctor", "--quick"], ["plan", "tiny", "--json", "-"]], ids=" ".join
)
def test_standard_output_that_takes_nothing_is_one_line_and_status_two(monkeypatch, capsys, output, call):
    from coat_jax.plan.row import PlanRow

    monkeypatch.setattr(row, "plan", lambda setting: PlanRow(setting, peak_bytes=1, step_seconds=1.0))
    monkeypatch.setattr(sys, "stdout", output())
    assert main(call) == 2
    with contextlib.suppress(OSError):
        sys.stdout.close()
    monkeypatch.undo()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("coat-jax: ")]
    assert len(lines) == 1 and "standard output cannot be written" in lines[0]


def test_json_for_a_closed_standard_output_is_refused_before_the_work(monkeypatch, no_work, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    for call in (["plan", "tiny", "--json", "-"], ["bench", "--json", "-"]):
        assert main(call) == 2
        assert "standard output is closed; give a file" in capsys.readouterr().err


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    """A process that may write 4096 bytes to a file, as on a device that is nearly full."""
    path = tmp_path / "results.json"
    path.write_text("before")
    path.chmod(0o640)
    program = """
import resource
from coat_jax import results
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    results.write("results.json", "x" * 9000)
except OSError as error:
    print(error)
print(open("results.json").read())
results.write("results.json", "x" * 9)
"""
    done = user_program.run(program, tmp_path)
    assert done.stdout.splitlines() == ["'results.json' is not written: File too large; what it held before stands", "before"]
    assert path.read_text() == "x" * 9 and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "link.json"
    link.symlink_to(path)
    results.write(link, "through")
    assert link.is_symlink() and path.read_text() == "through"


def test_an_interrupt_that_was_swallowed_comes_again():
    with pytest.raises(KeyboardInterrupt), heeded() as check:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_status_130_and_no_traceback(tmp_path):
    program = (
        "import os, signal, sys, threading, time\n"
        "def interrupt():\n"
        "    while 'coat_jax.train.loop' not in sys.modules:  # imports of other libraries may swallow an interrupt\n"
        "        time.sleep(0.1)\n"
        "    time.sleep({wait})\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "from coat_jax import cli\n"
        "sys.exit(cli.main(['compare', '--data', {data!r}, '--steps', '50000', '--batch', '2', '--seq', '16']))"
    )
    data = tmp_path / "text"
    data.mkdir()
    for name in ("a", "b"):
        (data / name).write_text(f"{name}: the quick brown fox jumps over the lazy dog\n" * 100)
    done = user_program.run(program.format(wait=3, data=str(data)), tmp_path)
    assert done.returncode == 130 and "Traceback" not in done.stderr


def test_without_the_extra_one_line_says_what_to_install(tmp_path):
    program = """
import sys
from coat_jax import cli
sys.modules["typer"] = None
first = cli.main(["--help"])
del sys.modules["typer"]
sys.modules["grain"] = None
sys.exit([first, cli.main(["compare", "--steps", "1"])] != [2, 2])
"""
    done = user_program.run(program, tmp_path)
    line = "coat-jax: this command needs {}; install it with: pip install '.[demo]' or 'coat-jax[demo]'\n"
    assert done.returncode == 0 and done.stderr == line.format("typer") + line.format("grain")


def test_status_reaches_the_shell(here):
    done = subprocess.run(
        [sys.executable, "-m", "coat_jax.cli", "compare", "--steps", "-1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "steps=-1" in done.stderr
    assert cli.REFUSED == 2

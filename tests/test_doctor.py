"""`coat-jax doctor` says what is missing and what to install, and its status says whether training would run."""

import contextlib
import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import pytest
import user_program

from coat_jax import cli, doctor
from coat_jax.bench.kernels import cases
from coat_jax.compiled import topology
from coat_jax.doctor import Verdict


def test_here_everything_that_training_needs_works(capsys):
    assert cli.main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 8 and all(line.startswith(("ok  ", "note")) for line in lines)
    assert any("cpu" in line for line in lines)


def test_json_has_every_finding_and_the_versions(capsys):
    assert cli.main(["doctor", "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"jax", "jaxlib", "python"} <= set(document["versions"])
    assert {f["verdict"] for f in document["findings"]} <= {"ok", "note"}


@pytest.mark.parametrize(
    ("package", "verdict", "advice"),
    [
        ("flax", Verdict.FAIL, "pip install flax"),
        ("nvidia-cudnn-cu12", Verdict.NOTE, "pip install nvidia-cudnn-cu12"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch, package, verdict, advice):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name in (package, "nvidia-cudnn-cu13") else real(name))
    findings = doctor.run(compile_kernels=False)
    assert [f for f in findings if f.verdict is verdict and f.advice.startswith(advice)]


def test_a_jaxlib_of_another_version_would_stop_training(monkeypatch, capsys):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.1.2" if name == "jaxlib" else real(name))
    assert cli.main(["doctor", "--quick"]) == 1
    assert f"pip install jaxlib=={real('jax')}" in capsys.readouterr().out


def test_without_the_plug_in_training_still_runs(monkeypatch, capsys):
    monkeypatch.setattr(topology, "missing", lambda: "no plug-in; install it with: pip install 'coat-jax[plan]'")
    assert cli.main(["doctor"]) == 0
    assert "install it with: pip install 'coat-jax[plan]'" in capsys.readouterr().out


def test_an_fp8_product_that_is_wrong_would_stop_training(monkeypatch, capsys):
    def broken():
        raise ArithmeticError("a product of quantized matrices is wrong")

    monkeypatch.setattr(doctor, "_fp8_here", broken)
    assert cli.main(["doctor", "--quick"]) == 1
    assert "fail" in capsys.readouterr().out


def test_on_a_hopper_gpu_kernels_run_and_a_wrong_one_is_named(monkeypatch):
    """Plain JAX stands in for the kernels."""
    whole = cases(doctor.SMALL)[0]
    right = dataclasses.replace(whole, make=lambda implementation: whole.make("xla"))
    wrong = dataclasses.replace(whole, name="wrong", make=lambda i: lambda x: whole.make("xla")(x if i == "xla" else 2 * x))
    monkeypatch.setattr(topology, "missing", lambda: None)
    monkeypatch.setattr(doctor, "hopper", lambda: True)
    monkeypatch.setattr(doctor, "_fp8_product", lambda: "")
    monkeypatch.setattr(doctor, "cases", lambda sizes: (right, wrong))
    findings = {f.name: f for f in doctor.run()}
    assert "runs; results are those of plain XLA: equal" in findings[f"kernel: {whole.name}"].seen
    assert findings["kernel: wrong"].verdict is Verdict.NOTE and "not those of plain XLA" in findings["kernel: wrong"].seen


def test_a_doctor_speaks_where_jax_finds_no_device(monkeypatch, capsys):
    def no_device():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(doctor.jax, "devices", no_device)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert cli.main(["doctor", "--json"]) == 1
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["devices"]["verdict"] == "fail" and "unset JAX_PLATFORMS, which is 'cuda'" in findings["devices"]["advice"]
    assert {"Python", "packages", "CUDA plug-in", "cuDNN attention"} <= set(findings)


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_doctor_speaks_in_a_process_whose_platform_is_not_there(tmp_path, platform):
    program = "import sys; from coat_jax import cli; sys.exit(cli.main(['doctor']))"
    done = user_program.run(program, tmp_path, JAX_PLATFORMS=platform)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"unset JAX_PLATFORMS, which is '{platform}'" in done.stdout and "cuDNN" in done.stdout


def test_an_interrupt_that_a_check_swallows_ends_the_report(monkeypatch):
    def swallows():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("INTERNAL: KeyboardInterrupt")

    monkeypatch.setattr(doctor, "_fp8_here", swallows)
    assert cli.main(["doctor", "--quick"]) == 130


def test_every_kernel_takes_the_probe():
    """Shapes alone, which every kernel of these widths takes: none refuses them by design."""
    for case in cases(doctor.SMALL):
        jax.eval_shape(case.make("pallas"), *case.abstract)


@pytest.mark.plan
def test_the_plug_in_says_how_to_keep_jax_quiet_and_that_does(tmp_path, monkeypatch, capsys):
    if not Path("/proc/driver/nvidia").exists():
        cli.main(["doctor", "--quick"])
        assert doctor.QUIET in capsys.readouterr().out
        name, value = doctor.QUIET.split()[1].split("=")
        done = user_program.run("import coat_jax, jax; jax.devices()", tmp_path, **{name: value})
        assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.plan
def test_products_and_kernels_compile_for_an_h100(monkeypatch):
    monkeypatch.setattr(doctor, "cases", lambda sizes: cases(sizes)[:2])
    findings = {f.name: f for f in doctor.run()}
    assert findings["FP8 product, compiled for an H100"].verdict is Verdict.OK
    kernels = [finding for name, finding in findings.items() if name.startswith("kernel: ")]
    assert len(kernels) == 2 and all(k.verdict is Verdict.OK and "compiled for an H100: " in k.seen for k in kernels)

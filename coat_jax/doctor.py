"""`coat-jax doctor`: what works on this machine, what does not, and what to install or change. One line each."""

import dataclasses
import enum
import functools
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from coat_jax.bench import compiled as static
from coat_jax.bench.kernels import KernelSpec, Sizes, cases
from coat_jax.bench.run import hopper
from coat_jax.bench.subjects import BenchConfig, checked
from coat_jax.compiled import topology
from coat_jax.compiled.compile import compile_for
from coat_jax.interrupts import heeded
from coat_jax.results import STANDARD_OUTPUT, provenance, write_json

SMALL = Sizes(tokens=512, hidden=1024, intermediate=2048)
"""What kernels are tried at: the norms' take rows of 1024 or more."""


QUIET = "harmless; JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 in the environment keeps JAX programs quiet"
"""What to do about the tracebacks that the plug-in logs in every JAX program of a machine without a driver."""


class Verdict(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    """Works."""
    NOTE = "note"
    """Something that only some of this library needs is missing."""
    FAIL = "fail"
    """The main job, training a model and comparing it with BF16, would not run."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      name: what was looked at.
      verdict: how it ended.
      seen: what was found.
      advice: what to install or change; empty where nothing is to be done.
    """

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""


def run(*, as_json: bool = False, compile_kernels: bool = True) -> list[Finding]:
    """Runs every check and prints a line for each.

    Args:
      as_json: print JSON instead.
      compile_kernels: run every kernel on this machine's Hopper GPU, or compile it for an H100: a minute.

    Returns:
      The findings; the main job would not run where one of them is `Verdict.FAIL`.
    """
    console = Console()
    styles = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "red"}
    findings = []
    with heeded() as check:
        for finding in _checks(compile_kernels):
            check()  # whatever goes wrong is a finding, an interrupt is none
            findings.append(finding)
            if not as_json:
                advice = f"; {finding.advice}" if finding.advice else ""
                console.print(f"{finding.verdict:4}", style=styles[finding.verdict], end=" ", highlight=False)
                console.print(f"{finding.name}: {finding.seen}{advice}", soft_wrap=True, markup=False, highlight=False)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        write_json(STANDARD_OUTPUT, provenance("coat-jax doctor --json") | {"findings": rows})
    return findings


def _checks(compile_kernels: bool) -> Iterator[Finding]:
    yield _python()
    yield from _versions()
    devices = _attempt("devices", _devices, Verdict.FAIL, _platform_advice())
    yield devices
    yield _main_job()
    if devices.verdict is Verdict.OK:
        yield _attempt("FP8 on this device", _fp8_here, Verdict.FAIL, "jax and jaxlib of one version, 0.10.2 or newer")
    yield _plug_in()
    yield _cudnn()
    if compile_kernels and topology.missing() is None and devices.verdict is Verdict.OK:
        yield _attempt("FP8 product, compiled for an H100", _fp8_product, Verdict.NOTE, "pip install 'coat-jax[plan]'")
        work = _runs if hopper() else _compiles
        for case in cases(SMALL):
            advice = "jax 0.12; implementation='xla' does the same"
            yield _attempt(f"kernel: {case.name}", functools.partial(work, case), Verdict.NOTE, advice)


def _platform_advice() -> str:
    asked = os.environ.get("JAX_PLATFORMS", "")
    return f"unset JAX_PLATFORMS, which is {asked!r}" if asked else "JAX finds no device, not even a CPU; reinstall jaxlib"


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(
        "Python", Verdict.OK if good else Verdict.FAIL, platform.python_version(), "" if good else "use 3.11 or newer"
    )


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str | None) -> list[str]:
    """Major, minor, patch: a fourth number is a rebuild."""
    return (version or "").split(".")[:3]


def _versions() -> Iterator[Finding]:
    found = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "chex", "orbax-checkpoint")}
    absent = [name for name, v in found.items() if v is None]
    seen = ", ".join(f"{name} {v}" for name, v in found.items() if v)
    yield Finding("packages", Verdict.FAIL if absent else Verdict.OK, seen, f"pip install {' '.join(absent)}" if absent else "")
    jax_version, jaxlib = found["jax"] or "", found["jaxlib"] or ""
    same = _release(jax_version) == _release(jaxlib)
    advice = "" if same else f"pip install jaxlib=={jax_version}"
    yield Finding("jax and jaxlib", Verdict.OK if same else Verdict.FAIL, f"{jax_version} and {jaxlib}", advice)


def _devices() -> str:
    devices = jax.devices()
    kinds = ", ".join(sorted({f"{d.device_kind} ({_meaning(d)})" for d in devices}))
    return f"{len(devices)} x {kinds}"


def _meaning(device: jax.Device) -> str:
    if device.platform != "gpu":
        return "FP8 is computed in wider numbers: right, not fast" if device.platform == "cpu" else device.platform
    capability = str(device.compute_capability)
    speeds = {"9.0": "Hopper: FP8 products and kernels", "8.9": "Ada: FP8 products, no kernels"}
    newer = float(capability) >= 10
    return f"compute capability {capability}, " + speeds.get(
        capability, "FP8 products, no kernels" if newer else "no FP8 products"
    )


def _main_job() -> Finding:
    needs = ("grain", "matplotlib", "typer", "rich")
    absent = [name for name in needs if importlib.util.find_spec(name) is None]
    advice = "pip install 'coat-jax[demo]'" if absent else ""
    seen = f"coat-jax compare lacks {', '.join(absent)}" if absent else "coat-jax compare has what it needs"
    return Finding("main job", Verdict.FAIL if absent else Verdict.OK, seen, advice)


def _plug_in() -> Finding:
    if message := topology.missing():
        return Finding("CUDA plug-in", Verdict.NOTE, "none, so no GPU and no plans for one", message.split("; ")[-1])
    found = {name: version(name) for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")}
    seen = {name: v for name, v in found.items() if v}
    wrong = [name for name, v in seen.items() if _release(v) != _release(version("jaxlib"))]
    advice = "pip install " + " ".join(f"{name}=={version('jaxlib')}" for name in wrong) if wrong else ""
    text = ", ".join(f"{name} {v}" for name, v in seen.items())
    if not wrong and not Path("/proc/driver/nvidia").exists():
        return Finding("CUDA plug-in", Verdict.OK, f"{text}, and no driver: it compiles, and logs tracebacks", QUIET)
    return Finding("CUDA plug-in", Verdict.NOTE if wrong else Verdict.OK, text, advice)


def _cudnn() -> Finding:
    found = version("nvidia-cudnn-cu12") or version("nvidia-cudnn-cu13")
    advice = (
        "" if found else "pip install nvidia-cudnn-cu12; without it attention on a GPU runs through XLA and takes more memory"
    )
    return Finding("cuDNN attention", Verdict.OK if found else Verdict.NOTE, f"cuDNN {found}" if found else "no cuDNN", advice)


def _attempt(name: str, check: Callable[[], str], failed: Verdict, advice: str) -> Finding:
    try:
        return Finding(name, Verdict.OK, check())
    except Exception as error:  # whatever goes wrong is the finding
        text = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        return Finding(name, failed, text, advice)


def _fp8_here() -> str:
    from coat_jax import E4M3, PerTensor, QuantSpec, dequantize, quantize

    x = jnp.arange(-8.0, 8.0).reshape(4, 4)
    q = jax.jit(lambda x: quantize(x, QuantSpec(E4M3, PerTensor())))(x)
    y = jax.jit(lambda q: dequantize(q) @ dequantize(q).T)(q)
    if not np.allclose(y, x @ x.T, rtol=0.1, atol=1.0):
        raise ArithmeticError("a product of quantized matrices is wrong")
    return "quantized, dequantized and multiplied"


def _fp8_product() -> str:
    from coat_jax import ops, recipes

    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    program = compile_for("h100", lambda x, w: ops.linear([x], [w], recipes.coat())[0], x, x)
    if not program.count("f8"):
        raise ArithmeticError(f"XLA made {', '.join(program.flops())} products of it")
    return f"{program.count('f8')} cuBLASLt FP8 product"


def _compiles(case: KernelSpec) -> str:
    row = static.compiled(case)
    return f"compiled for an H100: {row.registers} registers, {row.spills} bytes spilled"


def _runs(case: KernelSpec) -> str:
    *_, agreement = checked(case, BenchConfig(SMALL, "pallas", seed=secrets.randbits(31)))
    if agreement.wrong:
        raise ArithmeticError(f"its results are not those of plain XLA: {agreement}")
    return f"runs; results are those of plain XLA: {agreement}"

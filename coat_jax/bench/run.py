"""`coat-jax bench`, and `python -m coat_jax.bench` where nothing but JAX, Flax and Optax is installed."""

import dataclasses
import functools
import json as json_text
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from coat_jax.bench import calibrate, ceilings, subjects
from coat_jax.bench import compiled as static
from coat_jax.bench.kernels import LLAMA_7B, KernelSpec, matching
from coat_jax.bench.row import BenchRow, Clock, shown
from coat_jax.bench.subjects import BenchConfig
from coat_jax.compiled import devices, topology
from coat_jax.interrupts import heeded
from coat_jax.results import STANDARD_OUTPUT, check_file, load, provenance, write_json

BUDGET = 420.0
"""Seconds after which no row is begun, so that all ends within eight minutes."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12")
PATTERN = {"rows": [{"name": str}]}
"""What the JSON is like."""
RECORDED = Path(__file__).parents[2] / "results" / "kernels_static.json"


@dataclasses.dataclass(frozen=True)
class BenchOutput:
    """Where results go.

    Attributes:
      json: file for the rows, "-" for standard output, or None.
      calibrate: file for the device's description, or None.
      command: what was typed, for the record.

    Raises:
      ValueError: a file that cannot be written or holds something else, or a description that
        `coat_jax.compiled.devices.named` would not read.
    """

    json: str | None = None
    calibrate: str | None = None
    command: str = ""

    def __post_init__(self):
        if self.json == STANDARD_OUTPUT and sys.stdout is None:
            raise ValueError("json='-': standard output is closed; give a file")
        if self.json not in (None, STANDARD_OUTPUT):
            load("json", self.json, PATTERN)
        if self.calibrate is None:
            return
        check_file("calibrate", self.calibrate)
        if self.calibrate == self.json or not self.calibrate.endswith(".json"):
            raise ValueError(f"calibrate={self.calibrate!r}; give a file of its own, whose name ends in .json as plan wants it")
        if Path(self.calibrate).exists() and Path(self.calibrate).stat().st_size:
            devices.named(self.calibrate)  # only a description is replaced by another

    def say(self, line: str) -> None:
        """Shows a line to people: on standard error if the JSON goes to standard output."""
        print(line, file=sys.stderr if self.json == STANDARD_OUTPUT else sys.stdout, flush=True)

    def check_rows(self, names: Sequence[str], *, measured: bool) -> None:
        """Refuses to replace a file with rows that the new one would not have; measured ones are never replaced.

        Raises:
          ValueError: it holds some; the message says how many.
        """
        if self.json in (None, STANDARD_OUTPUT) or (held := load("json", self.json, PATTERN)) is None:
            return
        lost = [row["name"] for row in held["rows"] if measured or "seed" in held or row["name"] not in names]
        if lost:
            raise ValueError(f"json={self.json!r} holds {len(lost)} rows that would be lost; give another file")


def hopper() -> jax.Device | None:
    """The Hopper GPU of this machine, if it has one and JAX uses it."""
    device = jax.devices()[0]
    return device if device.platform == "gpu" and str(device.compute_capability) == "9.0" else None


def run(only: str = "", output: BenchOutput | None = None, budget: float = BUDGET) -> list[Any]:
    """Checks and times everything on this machine's Hopper GPU; without one, prints the static table and says so.

    Args:
      only: kernels whose names hold this, and no layer or step.
      output: where results go.
      budget: seconds after which no row is begun.

    Returns:
      `BenchRow`s, or `static.CompiledKernel`s without a GPU.

    Raises:
      ValueError: no kernel's name holds `only`, no time, or, without a Hopper GPU, nothing to calibrate or to compile with.
    """
    output = output or BenchOutput()
    if not budget > 0:
        raise ValueError(f"bench: budget={budget} s; give the seconds after which no row is begun")
    names = [case.name for case in matching(only)]
    device = hopper()
    output.check_rows(names, measured=device is not None)
    if device is not None:
        setting = BenchConfig(LLAMA_7B, "pallas", secrets.randbits(31))
        return measured(device, setting, only=only, output=output, budget=budget)
    found = jax.devices()[0].device_kind
    if output.calibrate:
        raise ValueError(f"bench: --calibrate measures a Hopper GPU, and JAX found {found} here; nothing was written")
    output.say(f"No Hopper GPU here (JAX found {found}): nothing is measured. This is the static table of the kernels.")
    return _static(only, output)


def _static(only: str, output: BenchOutput) -> list[static.CompiledKernel]:
    if message := topology.missing():
        if not RECORDED.exists():
            raise ValueError(f"bench: {message}; without it there is no table to show")
        if output.json:
            raise ValueError(f"bench: json={output.json!r} would be what was compiled here, and {message}; leave it out")
        recorded = json_text.loads(RECORDED.read_text(encoding="utf-8"))
        output.say(f"Not compiled here ({message}): recorded on {recorded['date']} with jax {recorded['versions']['jax']}.")
        rows = [static.CompiledKernel(**row) for row in recorded["rows"] if only in row["name"]]
        output.say(f"{recorded['note']}\n\n{static.shown(rows)}")
        return rows
    return static.run(only=only, json=output.json, command=output.command, say=output.say)


def measured(
    device: jax.Device,
    setting: BenchConfig,
    *,
    only: str = "",
    output: BenchOutput,
    budget: float = BUDGET,
    chosen: tuple[KernelSpec, ...] | None = None,
) -> list[BenchRow]:
    """All rows on a device: ceilings, layer and step, then kernels. One that fails says so and the others still run.

    Args:
      device: where everything runs.
      setting: sizes, implementation of the kernels and seed.
      only, output, budget: as in `run`.
      chosen: the kernels; None is all of them.

    Raises:
      ArithmeticError: after all rows are written, if a kernel's results are wrong.
    """
    clock = Clock(budget, output.say)
    kernels = matching(only, setting.sizes) if chosen is None else chosen
    with jax.default_device(device), heeded() as check:
        base = calibrate.described(device.device_kind)
        most, rows = ceilings.measure(setting.sizes, base, **setting.timing)
        here = calibrate.calibrated(base, device.device_kind, most)
        if output.calibrate:
            calibrate.write(output.calibrate, here)
        work: list[tuple[str, Callable[[], list[BenchRow]]]] = []
        if not only:
            work.append(("layer, forward and backward", lambda: subjects.layer_rows(setting, here)))
            work.append(("step of a layer", lambda: subjects.step_rows(setting, here)))
        work += [(case.name, functools.partial(subjects.kernel_rows, case, setting, most)) for case in kernels]
        for name, make in work:
            rows += clock.rows(name, make)
            check()  # an error is a row, an interrupt is none
            if output.json != STANDARD_OUTPUT:
                _write(rows, device, setting, clock, output)
    if output.json == STANDARD_OUTPUT:
        _write(rows, device, setting, clock, output)
    output.say(f"\n{device.device_kind}, {clock.elapsed:.0f} s, medians of {setting.repeats}:\n\n{shown(rows)}")
    for name, error in calibrate.errors(rows).items():
        output.say(f"step-time model, {name}: {error:+.0%} of what was measured")
    if wrong := [row.name for row in rows if row.check.startswith("WRONG")]:
        raise ArithmeticError(f"bench: results are wrong of {', '.join(wrong)}")
    return rows


def _write(rows: Sequence[BenchRow], device: jax.Device, setting: BenchConfig, clock: Clock, output: BenchOutput) -> None:
    """The rows so far, so that what ends the process loses none."""
    if output.json:
        about = {"device": device.device_kind, "capability": str(getattr(device, "compute_capability", ""))}
        about |= {"seconds": round(clock.elapsed, 1), **dataclasses.asdict(setting), "model_errors": calibrate.errors(rows)}
        record = {**provenance(output.command, PACKAGES), **about, "rows": [dataclasses.asdict(row) for row in rows]}
        write_json(output.json, record)

"""`coat-jax bench`, and `python -m coat_jax.bench` where nothing but JAX, Flax and Optax is installed."""

import dataclasses
import functools
import json as json_text
import os
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
from coat_jax.bench.worker import Worker
from coat_jax.compiled import devices, topology
from coat_jax.compiled.devices import Device
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


Call = Callable[..., Any]
"""(function, *args) -> function(*args), wherever."""


def here(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), in this process."""
    return function(*args)


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
    # This process only looks for the GPU; another one, which measures, takes the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = hopper()
    output.check_rows(names, measured=device is not None)
    if device is not None:
        setting = BenchConfig(LLAMA_7B, "pallas", secrets.randbits(31))
        with Worker() as worker:
            return measured(device, setting, only=only, output=output, budget=budget, call=worker.call)
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
    call: Call = here,
) -> list[BenchRow]:
    """All rows on a device: ceilings, optimizer, products, layer, then the other kernels. One that fails says so and the others
    still run; the file holds all rows that are finished, whatever ends this process.

    Args:
      device: where everything runs.
      setting: sizes, implementation of the kernels and seed.
      only, output, budget: as in `run`.
      chosen: the kernels; None is all of them.
      call: calls a function with arguments; `Worker.call` does it in a process of its own.

    Raises:
      ArithmeticError: after all rows are written, if a kernel's results are wrong.
    """
    clock = Clock(budget, output.say)
    rows: list[BenchRow] = []
    with jax.default_device(device), heeded() as check:
        base = calibrate.described(device.device_kind)
        try:
            most, rows = call(_ceilings, setting, base)
        except Exception as error:  # without ceilings there are still seconds
            most, rows = ceilings.Ceilings(None, None, None), [BenchRow.failed("ceiling", error)]
        check()
        described = calibrate.calibrated(base, device.device_kind, most)
        if output.calibrate:
            calibrate.write(output.calibrate, described)
        for name, function, *args in _work(setting, described, most, only, chosen):
            rows += clock.rows(name, functools.partial(call, function, *args))
            check()  # an error is a row, an interrupt is none
            if output.json != STANDARD_OUTPUT:
                _write(rows, device, setting, clock, output)
    if output.json == STANDARD_OUTPUT:
        _write(rows, device, setting, clock, output)
    output.say(f"\n{device.device_kind}, {clock.elapsed:.0f} s, medians of {setting.repeats}:\n\n{shown(rows)}")
    for name, off in calibrate.errors(rows).items():
        output.say(f"step-time model, {name}: {off:+.0%} of what was measured")
    if wrong := [row.name for row in rows if row.check.startswith("WRONG")]:
        raise ArithmeticError(f"bench: results are wrong of {', '.join(wrong)}")
    return rows


def _work(
    setting: BenchConfig, device: Device, most: ceilings.Ceilings, only: str, chosen: tuple[KernelSpec, ...] | None
) -> list[tuple[Any, ...]]:
    """Name of the row, function and arguments, what matters most first: the optimizer, products, the layer, other kernels."""
    kernels = matching(only, setting.sizes) if chosen is None else chosen
    # A kernel's name travels to another process, its functions do not.
    of_kernels = [
        (1 if case.name.startswith("AdamW") else 2 if case.flops else 4, case.name, *made)
        for case in kernels
        for made in [(kernel_rows, case.name, setting, most) if chosen is None else (subjects.kernel_rows, case, setting, most)]
    ]
    others = [
        (0, "step of a layer", subjects.step_rows, setting, device),
        (3, "layer, forward and backward", subjects.layer_rows, setting, device),
    ]
    return [tuple(rest) for _, *rest in sorted([*of_kernels, *([] if only else others)], key=lambda row: row[0])]


def kernel_rows(name: str, setting: BenchConfig, most: ceilings.Ceilings) -> list[BenchRow]:
    """`subjects.kernel_rows` of the kernel of that name."""
    [case] = [case for case in matching(name, setting.sizes) if case.name == name]
    return subjects.kernel_rows(case, setting, most)


def _ceilings(setting: BenchConfig, base: Device) -> tuple[ceilings.Ceilings, list[BenchRow]]:
    return ceilings.measure(setting.sizes, base, **setting.timing)


def _write(rows: Sequence[BenchRow], device: jax.Device, setting: BenchConfig, clock: Clock, output: BenchOutput) -> None:
    """The rows so far, so that what ends the process loses none."""
    if output.json:
        about = {"device": device.device_kind, "capability": str(getattr(device, "compute_capability", ""))}
        about |= {"seconds": round(clock.elapsed, 1), **dataclasses.asdict(setting), "model_errors": calibrate.errors(rows)}
        record = {**provenance(output.command, PACKAGES), **about, "rows": [dataclasses.asdict(row) for row in rows]}
        write_json(output.json, record)

"""`coat-jax plan`: rows, a table, JSON, a picture."""

import dataclasses
import io
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from coat_jax.compiled.devices import GIB
from coat_jax.interrupts import heeded
from coat_jax.plan import row as planning
from coat_jax.plan import search
from coat_jax.plan.config import PlanConfig
from coat_jax.plan.row import RESERVE_BYTES, PlanRow
from coat_jax.results import STANDARD_OUTPUT, check_file, load, provenance, write, write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda12-plugin", "nvidia-cudnn-cu12", "nvidia-cuda-nvcc-cu12")

PATTERN = {"rows": [planning.PATTERN]}
"""What the JSON is like."""

PICTURES = (".png", ".pdf", ".svg")
"""Kinds of files that a picture is written as."""

LEFT_OUT = (
    "Compiled: XLA's plan for the device, not a measurement. It leaves out the CUDA context, workspaces of cuBLAS and NCCL, "
    "and fragmentation. redone: share of the needed operations that is done twice. k tok/s: thousands of tokens per second and "
    "GPU, modelled, a bound from above."
)


@dataclasses.dataclass(frozen=True)
class PlanOutput:
    """What is shown and written.

    Attributes:
      json: a file for the rows, "-" for standard output, or None.
      plot: a file for the picture, of one of the kinds in `PICTURES`, or None.
      reserve_gib: what has to stay free for a step to fit.

    Raises:
      ValueError: a reserve that is no number of 0 or more, a file that cannot be written or holds something else, or a picture
        of an unknown kind.
    """

    json: str | None = None
    plot: Path | None = None
    reserve_gib: float = RESERVE_BYTES / GIB

    def __post_init__(self):
        if not 0 <= self.reserve_gib < math.inf:
            raise ValueError(f"reserve={self.reserve_gib} GiB; use a number of 0 or more")
        if self.json == STANDARD_OUTPUT and sys.stdout is None:
            raise ValueError("json='-': standard output is closed; give a file")
        if self.json not in (None, STANDARD_OUTPUT):
            load("json", self.json, PATTERN)
        if self.plot is not None:
            check_file("plot", self.plot)
            if Path(self.plot).suffix.lower() not in PICTURES:
                raise ValueError(f"plot={str(self.plot)!r}; give a name that ends in one of {', '.join(PICTURES)}")
            # Every kind of picture that Matplotlib writes says so in its first or last lines.
            if Path(self.plot).exists() and (content := Path(self.plot).read_bytes()) and b"atplotlib" not in content:
                raise ValueError(f"plot={str(self.plot)!r} is no picture of this command; it stands, give another file")

    @property
    def reserve_bytes(self) -> int:
        """The reserve in bytes."""
        return int(self.reserve_gib * GIB)

    @property
    def console(self) -> Console:
        """Where people read: standard error if the JSON goes to standard output."""
        return Console(stderr=self.json == STANDARD_OUTPUT)

    def check_rows(self, settings: Sequence[PlanConfig], *, fit: bool) -> None:
        """Refuses to replace a file that holds rows which the new one would not have.

        Raises:
          ValueError: it does; the message says how many.
        """
        if self.json in (None, STANDARD_OUTPUT) or (held := load("json", self.json, PATTERN)) is None:
            return
        new = {planning.key(dataclasses.asdict(setting)) for setting in settings}
        lost = [r for r in held["rows"] if planning.key(r) not in new or (r["largest_batch"] is not None and not fit)]
        if lost:
            raise ValueError(f"json={self.json!r} holds {len(lost)} rows that this plan would not have; give another file")

    def show(self, rows: Sequence[PlanRow], command: str) -> None:
        """The files, then the table."""
        document = provenance(command, PACKAGES) | {"rows": [row.to_json(self.reserve_bytes) for row in rows]}
        if self.json not in (None, STANDARD_OUTPUT):
            write_json(self.json, document)
        if self.plot is not None and any(row.error is None for row in rows):
            from coat_jax.plan.picture import frontier

            drawn = io.BytesIO()
            frontier(rows).savefig(drawn, format=Path(self.plot).suffix.lower()[1:], dpi=150)
            write(self.plot, drawn.getvalue())
        self.console.print(table(rows, self.reserve_bytes))
        for row in rows:
            if len(rows) == 1 or row.error is not None:
                self.console.print(details(row), highlight=False)
        self.console.print(LEFT_OUT, style="dim")
        if self.json == STANDARD_OUTPUT:
            write_json(STANDARD_OUTPUT, document)


def run(
    setting: PlanConfig, *, compare: bool = False, fit: bool = False, output: PlanOutput | None = None, command: str = ""
) -> list[PlanRow]:
    """Plans one setting, or the frontier around it, and shows it.

    Args:
      setting: what to plan.
      compare: plan every combination of `search.frontier`, sorted by peak.
      fit: search for the largest batch that fits, for every row.
      output: what is shown and written.
      command: what was typed, for the JSON.

    Raises:
      PlanError: no CUDA plug-in is installed.
    """
    output = output or PlanOutput()
    settings = search.frontier(setting) if compare else [setting]
    output.check_rows(settings, fit=fit)
    rows = sorted(planned(settings, output, fit=fit), key=lambda row: (row.error is not None, -row.peak_bytes))
    output.show(rows, command)
    return rows


def planned(settings: Iterable[PlanConfig], output: PlanOutput, *, fit: bool) -> list[PlanRow]:
    """Rows of the settings, with a progress bar."""
    settings = list(settings)
    parts = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*parts, console=output.console, transient=True) as progress, heeded() as check:
        task = progress.add_task("compiling", total=len(settings))

        def plan(setting: PlanConfig) -> PlanRow:
            progress.update(task, description=f"{setting.label}, batch {setting.batch}")
            row = planning.plan(setting)
            check()  # an error of the compiler is a row, an interrupt is none
            return row

        rows = []
        for setting in settings:
            rows.append(fitted(plan(setting), plan, output.reserve_bytes) if fit else plan(setting))
            progress.advance(task)
    return rows


def fitted(row: PlanRow, plan: Callable[[PlanConfig], PlanRow], reserve_bytes: int) -> PlanRow:
    """The row with the largest batch that fits."""
    if row.error is not None:
        return row
    return dataclasses.replace(row, largest_batch=search.largest_batch(row, plan, reserve_bytes))


def table(rows: Sequence[PlanRow], reserve_bytes: int) -> Table:
    """The rows for people; GiB."""
    first = rows[0].setting
    gpus = f"{first.gpus} x {first.device}" if first.gpus > 1 else f"one {first.device}"
    title = f"{first.model}, {gpus}, batch {first.batch}, sequence {first.seq}; GiB per GPU"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("step", no_wrap=True)
    with_batch = any(row.largest_batch is not None for row in rows)
    names = ["peak", "arguments", "temps", "fits", "redone", "k tok/s", *["fits batch"] * with_batch]
    for name in names:
        shown.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: row.error is not None):
        if row.error is not None:
            shown.add_row(row.setting.label, "does not compile", *[""] * (len(names) - 1), style="red")
            continue
        sizes = [f"{n / GIB:.1f}" for n in (row.peak_bytes, row.argument_bytes, row.temp_bytes)]
        cells = [*sizes, "yes" if row.fits(reserve_bytes) else "no", f"{row.recomputed:.1%}"]
        cells += [f"{row.tokens_per_second / 1000:.1f}", *[str(row.largest_batch)] * with_batch]
        shown.add_row(row.setting.label, *cells)
    return shown


def details(row: PlanRow) -> str:
    """Products, exchanges and what is kept, of one row, a line each."""
    if row.error is not None:
        return f"{row.setting.label}: {row.error}"
    products = ", ".join(f"{n} {kind}" for kind, n in sorted(row.products.items()))
    lines = [f"products in the program: {products}", f"kept for the backward pass: {row.kept_bytes / GIB:.1f} GiB"]
    if row.collective_bytes:
        largest_first = sorted(row.collective_bytes.items(), key=lambda item: -item[1])
        exchanges = ", ".join(f"{kind} {n / GIB:.2f}" for kind, n in largest_first)
        lines.append(f"exchanged in a step, GiB: {exchanges}")
    return "\n".join(lines)

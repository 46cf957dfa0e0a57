"""The paper's table of peak memory, with this library's rows beside: `coat-jax plan --table paper`. Resumable."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from coat_jax.compiled.devices import GIB
from coat_jax.plan import command
from coat_jax.plan.config import PlanConfig
from coat_jax.plan.row import key
from coat_jax.results import check_same, load, provenance, write_json


@dataclasses.dataclass(frozen=True)
class Published:
    """A column of Table 2 and Figure 1 of arXiv 2410.19313: measured peak per GPU, in the paper's GB; None: out of memory.

    Attributes:
      model, gpus: what was trained, context 2048, FSDP.
      bf16, transformer_engine, coat: peaks.
    """

    model: str
    gpus: int
    bf16: float | None
    transformer_engine: float | None
    coat: float | None


PUBLISHED = (
    Published("llama2-7b", 4, 55.1, 51.1, 35.6),
    Published("llama2-7b", 1, None, None, 79.3),
    Published("llama2-7b", 8, 41.2, 37.2, 27.0),
    Published("llama2-13b", 4, 76.1, 73.0, 49.1),
    Published("llama2-13b", 8, 49.4, 46.5, 32.5),
    Published("llama-30b", 8, None, None, 70.5),
)
WITHOUT_FIGURES = (("llama2-7b", 2), ("llama2-13b", 2))
SEQUENCES = 2  # of each GPU, as the paper's 7B on four GPUs


def settings() -> Iterator[PlanConfig]:
    """Every cell of the table, the ones with a published figure first."""
    for model, gpus in [*((p.model, p.gpus) for p in PUBLISHED), *WITHOUT_FIGURES]:
        start = PlanConfig(model, "plain", "optax", batch=SEQUENCES * gpus, gpus=gpus)
        yield start
        yield start.replace(remat="dots")
        yield start.replace(recipe="coat", codec="coat")
        yield start.replace(recipe="lean", codec="coat")
        yield start.replace(recipe="lean", codec="coat", fused=True)


def run(path: Path, *, output: command.PlanOutput, typed: str, fit: bool = True) -> dict[str, Any]:
    """Plans every cell that `path` does not hold yet, writing the file after each, and prints the table.

    Args:
      path: JSON; created, or continued.
      output: what is shown, and the reserve.
      typed: the command, for the JSON.
      fit: search for the largest batch of the cells on one GPU.

    Raises:
      PlanError: no CUDA plug-in is installed.
      ValueError: path cannot be written, or holds something else or cells of other versions.
    """
    fresh = provenance(typed, command.PACKAGES) | {"rows": []}
    document = load("json", path, command.PATTERN) or fresh
    check_same("json", path, document, fresh, ("versions",))
    done = {key(row) for row in document["rows"]}
    for setting in settings():
        if key(dataclasses.asdict(setting)) not in done:
            rows = command.planned([setting], output, fit=fit and setting.gpus == 1)
            document["rows"] += [row.to_json(output.reserve_bytes) for row in rows]
            write_json(path, document)
    output.console.print(table(document["rows"]))
    output.console.print(command.LEFT_OUT, style="dim")
    return document


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each model and number of GPUs: compiled GiB of ours and of BF16, then the published figures."""
    shown = Table(title=f"GiB per GPU, {SEQUENCES} sequences of 2048 for each GPU", title_justify="left", box=None)
    ours = {s.label: None for s in settings()}
    for name in ("model", "GPUs", *ours, "paper: BF16", "COAT"):
        shown.add_column(name, justify="left" if name == "model" else "right")
    labels = [
        (PlanConfig(**dict(zip([f.name for f in dataclasses.fields(PlanConfig)], key(row), strict=True))), row) for row in rows
    ]
    figures = {(p.model, p.gpus): (p.bf16, p.coat) for p in PUBLISHED}
    for model, gpus in dict.fromkeys((s.model, s.gpus) for s, _ in labels):
        cells = {s.label: row for s, row in labels if (s.model, s.gpus) == (model, gpus)}
        peaks = [peak(cells.get(label)) for label in ours]
        published = (
            [("out" if f is None else f"{f:.1f}") for f in figures[model, gpus]] if (model, gpus) in figures else ["", ""]
        )
        shown.add_row(model, str(gpus), *peaks, *published)
    return shown


def peak(row: dict[str, Any] | None) -> str:
    """The peak of a row in GiB, and the largest batch where it was searched for."""
    if row is None:
        return ""
    if row["error"]:
        return "error"
    batch = "" if row["largest_batch"] is None else f" (up to {row['largest_batch']})"
    return f"{row['peak_bytes'] / GIB:.1f}{batch}"

"""`coat-jax codecs`: every codec measured, on random gradients and on a small Llama, as a table and as JSON."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from coat_jax.optim import codecs
from coat_jax.results import check_folder, check_same, load, write_json
from coat_jax.studies import codec_errors, report
from coat_jax.studies.codec_study import Study, bytes_per_parameter, real_moments
from coat_jax.studies.variants import StudyConfig, check_count
from coat_jax.train import data as text

PATTERN = {"settings": dict, "corpus": dict, "seeds": int, "codecs": {str: dict}}
"""What a `codecs.json` is like."""
PERTURBED = "float32, perturbed"
"""The row of float32 runs whose initial parameters were changed a little."""


def run(
    settings: StudyConfig,
    *,
    seeds: int = 5,
    groups: int = 16,
    last: int = codec_errors.LAST,
    data: Sequence[Path | str] = (),
    out: Path = Path("out"),
    command: str = "coat_jax.studies.codec_table.run",
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures every codec, prints the table, and writes `codecs.json` into the folder `out` after every measurement.

    A `codecs.json` of the same settings is taken up where it ends; more seeds add to its runs.

    Args:
      settings: the small Llama; its variants are not used, its seed splits the text.
      seeds: runs of each codec.
      groups: groups of 128 elements in each case on random gradients.
      last: steps after a drop.
      data: text files or folders; none is the standard library's source.
      out: a folder, made where it does not exist.
      command: what to name as the origin of the results.
      console: where to print.

    Returns:
      What `codecs.json` holds.

    Raises:
      ValueError: too few seeds or groups, text that is missing or too small, or an `out` that is a file, that cannot be
        written, or that holds measurements of other settings, text or versions.
      DivergedError: a loss that is not finite; what was measured until then is written.
    """
    console = console or Console()
    check_count("seeds", seeds, 2, 10_000)  # a standard error needs two
    check_count("groups", groups, 1, 4096)
    check_folder("out", out)
    corpus = text.load(data, seed=settings.seed, least_bytes=settings.batch * settings.seq + 1)
    path = out / "codecs.json"
    results = report.header(settings, corpus, command) | {"seeds": seeds, "groups": groups, "last": last, "codecs": {}}
    results = json.loads(json.dumps(results))  # tuples become lists, as in the file
    old = load("out", path, PATTERN) if out.exists() else None
    if old is not None:
        check_same("out", path, old, results, ("settings", "versions", "corpus", "groups", "last"))
        results = old | {"seeds": max(seeds, old["seeds"])}
    out.mkdir(parents=True, exist_ok=True)
    columns = (
        *Progress.get_default_columns()[:3],
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        _errors(results, path, progress)
        _runs(results, path, progress, Study(settings, corpus))
    results["verdicts"] = verdicts(results)
    write_json(path, results)
    for view in tables(results):
        console.print(view)
    console.print(f"Written: {path}", highlight=False)
    return results


def _errors(results: dict[str, Any], path: Path, progress: Progress) -> None:
    """Bytes and errors on random gradients, of every codec that lacks them."""
    task = progress.add_task("random gradients", total=len(codecs.names()), note="")
    for name in codecs.names():
        progress.update(task, note=name)
        row = results["codecs"].setdefault(name, {})
        if "bytes_per_parameter" not in row:
            codec = codecs.named(name)
            row["bytes_per_parameter"] = bytes_per_parameter(codec)
            if codec.quantizes:
                row |= codec_errors.measure(codec, groups=results["groups"], last=results["last"])
            write_json(path, results)
        progress.update(task, advance=1)


def _runs(results: dict[str, Any], path: Path, progress: Progress, study: Study) -> None:
    """Runs of the small Llama that are not there yet. float32 comes first: its moments are stored by every codec."""
    steps, seeds = study.settings.steps, results["seeds"]
    rows = [("float32", False), *((name, False) for name in codecs.names() if name != "float32"), ("float32", True)]
    task = progress.add_task("Llama", total=len(rows) * seeds * steps, note="")
    for name, perturbed in rows:
        label = PERTURBED if perturbed else name
        runs = results["codecs"].setdefault(label, {}).setdefault("runs", [])
        progress.update(task, advance=len(runs) * steps)
        trainer = None
        for seed in range(len(runs), seeds):
            progress.update(task, note=f"{label}, seed {seed}")
            trainer = trainer or study.trainer(codecs.named(name))
            row, state = study.run(trainer, seed, perturbed=perturbed, advance=lambda: progress.update(task, advance=1))
            if label == "float32" and seed == 0:
                results["real_moments"] = real_moments(state)
            runs.append(row)
            write_json(path, results)


def loss_difference(results: dict[str, Any], label: str) -> tuple[float, float]:
    """Mean over seeds of the validation loss above float32's of the same seed, and its standard error."""
    runs = [results["codecs"][name]["runs"] for name in (label, "float32")]
    above = [a["validation_loss"] - b["validation_loss"] for a, b in zip(*runs, strict=True)]
    return statistics.fmean(above), statistics.stdev(above) / math.sqrt(len(above))


def verdicts(results: dict[str, Any]) -> dict[str, Any]:
    """For every codec whether it passes: dormant elements, drops, and a loss at most max(0.01, 2 standard errors) above
    float32's, the standard error being the larger of its own and the perturbed runs'."""
    noise = loss_difference(results, PERTURBED)[1]
    found = {}
    for name, row in results["codecs"].items():
        if "dormant" in row:
            mean, error = loss_difference(results, name)
            bound = max(0.01, 2 * max(error, noise))
            found[name] = {
                "dormant": row["dormant"]["passed"],
                "drop": row["drop"]["passed"],
                "loss": mean <= bound,
                "loss_above_float32": mean,
                "loss_bound": bound,
            }
    return found


def tables(results: dict[str, Any]) -> list[Table]:
    """The results as two tables with a row for each codec: errors on random gradients, and everything else."""
    sigmas = " / ".join(f"{s:g}" for s in codec_errors.SIGMAS)
    errors = Table(title=f"error of the update in %, scales of gradients lognormal(sigma), sigma {sigmas}")
    others = Table(title="bytes, tests, and a small Llama: storing its moments once, and its validation loss")
    for view, headings in (
        (errors, ("codec", "one shot", "closed loop, b2 0.95", "b2 0.999")),
        (others, ("codec", "B/parameter", "dormant", "drop", "real moments", "loss above float32's")),
    ):
        for heading in headings:
            view.add_column(heading, justify="left" if heading == "codec" else "right")

    def percent(values: list[float]) -> str:
        return " / ".join(f"{100 * value:.{1 if value < 0.1 else 0}f}" for value in values)

    for name, row in results["codecs"].items():
        mean, deviation = loss_difference(results, name)
        loss = "" if name == "float32" else f"{mean:+.4f} ± {deviation:.4f}"
        if "dormant" not in row:
            others.add_row(name, f"{row.get('bytes_per_parameter', 8.0):.3f}", "", "", "", loss)
            continue
        loop = row["closed_loop"]
        errors.add_row(name, *map(percent, (row["one_shot"], loop["0.95"], loop["0.999"])))
        tests = ["passed" if row[test]["passed"] else "failed" for test in ("dormant", "drop")]
        real = f"{100 * results['real_moments']['relative_error'][name]['update']:.1f} %"
        others.add_row(name, f"{row['bytes_per_parameter']:.3f}", *tests, real, loss)
    return [errors, others]

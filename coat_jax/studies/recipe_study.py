"""`coat-jax recipes`: every recipe trained from several seeds on real text, and how far its mean loss is from BF16's."""

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from coat_jax.results import check_new, check_same, load, provenance, write_json
from coat_jax.studies import accounting
from coat_jax.studies.variants import StudyConfig, build, check_count
from coat_jax.train import data as text
from coat_jax.train.loop import Trainer

PATTERN = {"settings": {"variants": [str]}, "variants": {str: {"validation_loss": {str: float}}}}
"""What the file is like."""


def run(
    settings: StudyConfig,
    *,
    seeds: int = 5,
    data: tuple[Path | str, ...] = (),
    out: Path = Path("results/recipes.json"),
    command: str = "coat_jax.studies.recipe_study.run",
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains every variant from every seed, prints a table and writes `out`, again after every run.

    A variant is compiled once for all its seeds. Runs that `out` already holds are not repeated, and stay: a run with more
    variants or seeds adds to them.

    Args:
      settings: what to train; its seed is the first.
      seeds: how many.
      data: text files or folders; none is the standard library's source.
      out: a JSON file.
      command: what to name as the origin of the results.
      console: where to print.

    Returns:
      What `out` holds: for each variant its validation loss by seed, their mean, and how far that is above the first variant's.

    Raises:
      ValueError: no seed, text that is missing or too small, or an `out` that cannot be written, or that holds runs of other
        settings, text or versions, or something else.
      DivergedError: a loss that is not finite; the runs before it are written.
    """
    check_count("seeds", seeds, 1, 10_000)
    check_count("seed", settings.seed + seeds - 1, 0, 2**32 - 1)
    check_new("out", out)
    console = console or Console()
    results = started(settings, data, out, command)
    shape = np.zeros((settings.batch, settings.seq + 1), np.int32)
    trainers = {name: Trainer(build(settings, name), shape) for name in settings.variants}
    for seed, (name, trainer) in itertools.product(range(settings.seed, settings.seed + seeds), trainers.items()):
        variant = results["variants"].setdefault(name, {"validation_loss": {}})
        if str(seed) not in variant["validation_loss"]:
            with console.status(f"{name}, seed {seed}"):
                variant["validation_loss"][str(seed)] = validation_loss(trainer, settings, seed, data)
                _save(results, out)
            console.print(f"{name}, seed {seed}: {variant['validation_loss'][str(seed)]:.4f}", highlight=False)
    for name, trainer in trainers.items():
        if "kept_bytes" not in results["variants"][name]:
            results["variants"][name]["kept_bytes"] = kept_bytes(trainer, settings)
    _save(results, out)
    console.print(table(results))
    return results


def started(settings: StudyConfig, data: tuple[Path | str, ...], out: Path, command: str) -> dict[str, Any]:
    """What a study begins with: the runs that `out` holds, and no other where there is no file.

    Raises:
      ValueError: text that is missing or too small, or a file that holds runs of other settings, text or versions, or something
        else.
    """
    corpus = text.load(data, seed=settings.seed, least_bytes=settings.batch * settings.seq + 1)
    size = {
        "bytes": len(corpus.train) + len(corpus.validation),
        "files": len(corpus.train_files) + len(corpus.validation_files),
    }
    results = provenance(command) | {"settings": json.loads(json.dumps(dataclasses.asdict(settings)))}
    results |= {"corpus": size, "variants": {}}
    before = load("out", out, PATTERN) if out.parent.is_dir() else None
    if before is None:
        return results
    names = [*before["settings"]["variants"], *settings.variants]
    results["settings"]["variants"] = before["settings"]["variants"] = list(dict.fromkeys(names))
    before.setdefault("corpus", size)  # a file from before the text was recorded
    check_same("out", out, before, results, ("settings", "corpus", "versions"))
    return results | {"variants": before["variants"]}


def _save(results: dict[str, Any], out: Path) -> None:
    summarise(results, tuple(results["settings"]["variants"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, results)


def validation_loss(trainer: Trainer, settings: StudyConfig, seed: int, data: tuple[Path | str, ...]) -> float:
    """The loss on validation text, nats per byte, after training from one seed."""
    corpus = text.load(data, seed=seed, least_bytes=settings.batch * settings.seq + 1)
    batches = text.Windows(corpus.train, settings.seq).batches(settings.batch, seed)
    state = trainer.start(seed)
    for step in trainer.train(state, itertools.islice(batches, settings.steps)):
        state = step.state
    held_out = text.Windows(corpus.validation, settings.seq).batches(settings.batch, seed)
    return trainer.evaluate(state.params, itertools.islice(held_out, settings.validation_batches))


def kept_bytes(trainer: Trainer, settings: StudyConfig) -> float:
    """Bytes kept for the backward pass per token and layer, from the compiled step, attention matrices left out."""
    return accounting.kept_bytes(trainer.compiled, batch=settings.batch, seq=settings.seq, heads=settings.model_config.heads)


def summarise(results: dict[str, Any], variants: tuple[str, ...]) -> None:
    """Adds to every variant its mean and, over the seeds that both have, the differences to the first variant in percent."""
    first = results["variants"].get(variants[0], {"validation_loss": {}})["validation_loss"]
    for variant in results["variants"].values():
        losses = variant["validation_loss"]
        if losses:
            variant["mean"] = statistics.fmean(losses.values())
        if above := [100 * (losses[seed] / first[seed] - 1) for seed in losses if seed in first]:
            variant["above_first_percent"] = {"mean": statistics.fmean(above), "least": min(above), "most": max(above)}


def table(results: dict[str, Any]) -> Table:
    """The variants side by side, for a terminal."""
    s = results["settings"]
    title = f"{s['preset']} Llama, {s['steps']} steps of {s['batch']} x {s['seq']} bytes, validation loss in nats per byte"
    shown = Table(title=title, title_justify="left")
    for column in ("variant", "seeds", "mean", f"above {s['variants'][0]}", "least to most", "kept (B/token/layer)"):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for name, variant in results["variants"].items():
        above = variant.get("above_first_percent")  # none where no seed was run with both
        spread = f"{above['least']:+.2f} to {above['most']:+.2f} %" if above else ""
        mean = f"{above['mean']:+.2f} %" if above else ""
        # Of a variant that only an earlier, interrupted run trained there may be less.
        loss, kept = (
            f"{variant[key]:{form}}" if key in variant else "" for key, form in (("mean", ".4f"), ("kept_bytes", ",.0f"))
        )
        shown.add_row(name, str(len(variant["validation_loss"])), loss, mean, spread, kept)
    return shown

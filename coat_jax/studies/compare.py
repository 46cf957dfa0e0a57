"""`coat-jax compare`: the same model trained in BF16 and with COAT on the same text, side by side."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coat_jax.models import plain
from coat_jax.results import check_folder
from coat_jax.studies import accounting, report
from coat_jax.studies.variants import StudyConfig, build
from coat_jax.train import data as text
from coat_jax.train.loop import DivergedError, Trainer, Variant


def run(
    settings: StudyConfig,
    *,
    data: Sequence[Path | str] = (),
    out: Path = Path("out"),
    command: str = "coat_jax.studies.compare.run",
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains every variant, prints a table, and writes `compare.json` and `compare.png` into the folder `out`.

    All variants see the same batches in the same order and take their steps in turn, so that whatever else the
    machine does slows all of them. Losses are means in nats per byte; the training loss is that of the last tenth of the steps.

    Args:
      settings: what to train.
      data: text files or folders; none is the standard library's source.
      out: a folder, made where it does not exist.
      command: what to name as the origin of the results.
      console: where to print.

    Returns:
      What `compare.json` holds.

    Raises:
      ValueError: text that is missing or too small, a model that does not fit, or an `out` that is a file or that holds a
        comparison of other settings.
      DivergedError: a loss that is not finite. What was measured until then is written first, as it is on an interrupt and on
        any other error.
    """
    console = console or Console()
    check_folder("out", out)
    corpus = text.load(data, seed=settings.seed, least_bytes=settings.batch * settings.seq + 1)
    results = report.header(settings, corpus, command)
    folder = report.Folder.of(out, results)
    shape = np.zeros((settings.batch, settings.seq + 1), np.int32)
    trainers = {name: Trainer(build(settings, name), shape) for name in settings.variants}
    needed = sum(accounting.nbytes(trainer.abstract_state) for trainer in trainers.values())
    if needed > accounting.memory():
        raise ValueError(
            f"compare: preset={settings.preset!r} needs {needed / 2**30:.1f} GiB for parameters and moments of "
            f"{len(trainers)} variants, here are {accounting.memory() / 2**30:.1f}; use a smaller preset or fewer variants"
        )
    results["variants"] = {name: {"losses": [], "step_seconds": []} for name in settings.variants}
    try:
        _train(trainers, settings, corpus, results["variants"], console, lambda: folder.save(results))
        folder.save(results)
        with console.status("reading the compiled programs"):
            _account(trainers, settings, results, shape)
    except BaseException as error:
        if isinstance(error, DivergedError):
            results["diverged"] = {"variant": error.variant, "step": error.step, "loss": str(error.loss)}
        folder.save(results, picture=True)
        raise
    folder.save(results, picture=True)
    console.print(report.table(results))
    for line in [*report.notes(results), f"Written: {out / report.JSON_NAME}, {out / report.PNG_NAME}"]:
        console.print(line, highlight=False)
    return results


def _train(
    trainers: dict[str, Trainer],
    settings: StudyConfig,
    corpus: text.Corpus,
    results: dict[str, Any],
    console: Console,
    save: Callable[[], None],
) -> None:
    """Trains all variants in turn, fills `results` step by step, and saves them each tenth of the way."""
    windows = text.Windows(corpus.train, settings.seq)
    columns = (
        *Progress.get_default_columns()[:3],
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=settings.steps, loss="")
        for trainer in trainers.values():
            progress.update(task, description=f"compiling {trainer.variant.name}")
            _ = trainer.compiled
        progress.update(task, description="training")
        runs = {}
        for name, trainer in trainers.items():
            batches = itertools.islice(windows.batches(settings.batch, settings.seed), settings.steps)
            runs[name] = trainer.train(trainer.start(settings.seed), batches)
        params = {}
        for number in range(1, settings.steps + 1):
            for name, steps in runs.items():
                step = next(steps)
                params[name] = step.state.params
                results[name]["losses"].append(step.loss)
                results[name]["step_seconds"].append(round(step.seconds, 5))
            losses = "  ".join(f"{name} {results[name]['losses'][-1]:.3f}" for name in runs)
            progress.update(task, advance=1, loss=f"loss: {losses}")
            if number % max(1, settings.steps // 10) == 0:
                save()
                if not console.is_terminal:  # a log has no bar
                    console.print(f"step {number} of {settings.steps}, loss: {losses}", highlight=False)
        progress.update(task, description="validating")
        held_out = text.Windows(corpus.validation, settings.seq).batches(settings.batch, settings.seed)
        validation = list(itertools.islice(held_out, settings.validation_batches))
        for name, trainer in trainers.items():
            variant = results[name]
            variant["training_loss"] = statistics.fmean(variant["losses"][-max(1, settings.steps // 10) :])
            variant["validation_loss"] = trainer.evaluate(params[name], validation)
            variant["seconds_per_step"] = statistics.median(variant["step_seconds"])


def _account(trainers: dict[str, Trainer], settings: StudyConfig, results: dict[str, Any], batch: np.ndarray) -> None:
    """Adds bytes of state and bytes kept, of every variant, and of the same model in plain Flax."""
    config = settings.model_config
    sizes = {"batch": settings.batch, "seq": settings.seq, "heads": config.heads}
    for name, trainer in trainers.items():
        variant = results["variants"][name]
        variant["optimizer_state"] = accounting.state_bytes(trainer.abstract_state.opt_state)
        variant["kept_bytes"] = accounting.kept_bytes(trainer.compiled, **sizes)
    first = next(iter(trainers.values())).variant
    reference = Trainer(Variant.of_model("plain Flax", plain.Llama(config), first.optimizer), batch)
    results["plain_flax_kept_bytes"] = accounting.kept_bytes(reference.compiled, **sizes)

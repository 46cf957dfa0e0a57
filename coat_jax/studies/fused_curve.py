"""Loss curves of the fused step and the ordinary one on real text, over seeds: `python -m coat_jax.studies.fused_curve`."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.results import check_new, load, write_json
from coat_jax.studies import report
from coat_jax.studies.variants import StudyConfig, build
from coat_jax.train import data
from coat_jax.train.loop import Trainer

TAIL = 30
"""Steps whose mean loss is the end of a curve."""


def run(settings: StudyConfig, seeds: int, *, out: Path | None = None) -> dict[str, Any]:
    """Trains the two variants of `settings` with every seed, and measures their distance against the spread of the seeds.

    All seeds see the same text. The noise is the standard deviation over seeds of the end of the first variant's curve; the
    distance is the mean over seeds of the difference of the ends.

    Args:
      settings: two variants, the ordinary one first.
      seeds: how many; initial values and order of the text.
      out: a JSON file to write.

    Returns:
      What the file holds.
    """
    if out is not None:
        check_new("out", out)
        if out.exists():
            load("out", out, {"curves": dict})
    corpus = data.load((), seed=0, least_bytes=settings.batch * settings.seq + 1)
    windows = data.Windows(corpus.train, settings.seq)
    shape = np.zeros((settings.batch, settings.seq + 1), np.int32)
    trainers = {name: Trainer(build(settings, name), shape) for name in settings.variants}
    results = report.header(settings, corpus, "python -m coat_jax.studies.fused_curve")
    curves: dict[str, list[list[float]]] = {name: [] for name in settings.variants}
    for seed, (name, trainer) in itertools.product(range(seeds), trainers.items()):
        batches = itertools.islice(windows.batches(settings.batch, seed), settings.steps)
        curves[name].append([round(step.loss, 5) for step in trainer.train(trainer.start(seed), batches)])
        print(f"seed {seed}, {name}: {statistics.fmean(curves[name][-1][-TAIL:]):.4f} nats per byte", flush=True)
    ends = {name: [statistics.fmean(curve[-TAIL:]) for curve in runs] for name, runs in curves.items()}
    first, second = ends.values()
    results |= {
        "curves": curves,
        "ends": ends,
        "distance": statistics.fmean(b - a for a, b in zip(first, second, strict=True)),
        "seed_noise": statistics.stdev(first),
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, results)
    return results


def main() -> None:
    """300 steps of the tiny Llama with `lean()` and COAT moments, three seeds; writes results/fused_curve.json."""
    settings = StudyConfig(variants=("lean", "lean+fused"), steps=300, batch=4, seq=64)
    found = run(settings, 3, out=Path("results/fused_curve.json"))
    print(json.dumps({key: found[key] for key in ("ends", "distance", "seed_noise")}, indent=1))


if __name__ == "__main__":
    main()

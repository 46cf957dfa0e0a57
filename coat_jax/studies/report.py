"""What a comparison leaves behind: a table, a JSON file and a picture of the loss curves."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.ticker
import numpy as np
from rich.table import Table

from coat_jax.results import check_folder, check_same, load, provenance, write, write_json
from coat_jax.studies.variants import StudyConfig
from coat_jax.train.data import Corpus

JSON_NAME, PNG_NAME = "compare.json", "compare.png"
PATTERN = {"settings": dict, "corpus": dict, "variants": {str: {"losses": [float]}}}
"""What a `compare.json` is like."""


def header(settings: StudyConfig, corpus: Corpus, command: str) -> dict[str, Any]:
    """Where results come from: command, date, versions, settings and text."""
    return provenance(command) | {
        "settings": dataclasses.asdict(settings),
        "corpus": {
            "train_bytes": len(corpus.train),
            "train_files": len(corpus.train_files),
            "validation_bytes": len(corpus.validation),
            "validation_files": len(corpus.validation_files),
        },
    }


def amount(results: dict[str, Any] | None) -> int:
    """How much a comparison holds: its losses, and one more each for validation and for what was read of programs."""
    if results is None:
        return 0
    variants = results["variants"].values()
    validated = bool(variants) and all("validation_loss" in variant for variant in variants)
    return sum(len(variant["losses"]) for variant in variants) + validated + ("plain_flax_kept_bytes" in results)


@dataclasses.dataclass(frozen=True)
class Folder:
    """Where a comparison is written, again and again while it grows.

    A run that is repeated makes the numbers that it made before, so a file of the same settings stands until the new run has
    as much as it holds, and nothing is lost by an interrupt.

    Attributes:
      out: the folder.
      held: the `amount` of the comparison that was there before.
    """

    out: Path
    held: int

    @classmethod
    def of(cls, out: Path, results: dict[str, Any]) -> "Folder":
        """The folder for a comparison that begins.

        Args:
          out: a folder, made when it is first written to.
          results: the `header`.

        Raises:
          ValueError: no folder that can be written, or one with a comparison of other settings or text, or with a file of its
            name that is none.
        """
        check_folder("out", out)
        before = load("out", out / JSON_NAME, PATTERN) if out.exists() else None
        if before is not None:
            check_same("out", out / JSON_NAME, before, results, ("settings", "corpus"))
        return cls(out, amount(before))

    def save(self, results: dict[str, Any], *, picture: bool = False) -> None:
        """Writes `compare.json`, and `compare.png` where it is asked for, unless less is known than what stands there.

        Raises:
          OSError: they cannot be written.
        """
        if amount(results) >= max(1, self.held):
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / JSON_NAME, results)
            if picture:
                drawn = io.BytesIO()
                plot(results).savefig(drawn, format="png", dpi=150)
                write(self.out / PNG_NAME, drawn.getvalue())


def rows(results: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The lines of the table: a label, and a text for each variant."""
    variants = list(results["variants"].values())
    first, base, plain = next(iter(results["variants"])), variants[0], results["plain_flax_kept_bytes"]
    states = [variant["optimizer_state"] for variant in variants]

    def above(key: str) -> list[str]:
        return ["" if variant is base else f"{100 * (variant[key] / base[key] - 1):+.2f} %" for variant in variants]

    return [
        ("training loss (nats/byte)", [f"{variant['training_loss']:.4f}" for variant in variants]),
        (f"  above {first}", above("training_loss")),
        ("validation loss (nats/byte)", [f"{variant['validation_loss']:.4f}" for variant in variants]),
        (f"  above {first}", above("validation_loss")),
        ("optimizer state (B/parameter)", [f"{s['bytes_per_parameter']:.3f}" for s in states]),
        (
            "  of quantized parameters (B/parameter)",
            [f"{s['bytes_per_quantized_parameter'] or 0:.3f}".replace("0.000", "-") for s in states],
        ),
        ("  parameters with f32 moments", [f"{s['f32_parameters']:,}" for s in states]),
        ("kept for backward (B/token/layer)", [f"{variant['kept_bytes']:,.0f}" for variant in variants]),
        ("  of what plain Flax keeps", [f"{variant['kept_bytes'] / plain:.2f}" for variant in variants]),
        ("seconds per step (median)", [f"{variant['seconds_per_step']:.3f}" for variant in variants]),
    ]


def table(results: dict[str, Any]) -> Table:
    """The variants side by side, for a terminal."""
    s = results["settings"]
    shown = Table(title=f"{s['preset']} Llama, {s['steps']} steps of {s['batch']} x {s['seq']} bytes", title_justify="left")
    shown.add_column("", no_wrap=True)
    for name in results["variants"]:
        shown.add_column(name, justify="right")
    for label, texts in rows(results):
        shown.add_row(label, *texts)
    return shown


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader of the table should know: the baseline of kept bytes, and which moments stay in f32."""
    lines = [
        f"Kept for backward: read from the compiled steps, attention matrices left out; plain Flax in BF16 keeps "
        f"{results['plain_flax_kept_bytes']:,.0f} B."
    ]
    for name, variant in results["variants"].items():
        state = variant["optimizer_state"]
        if state["quantized_parameters"] and state["f32_leaves"]:
            lines.append(f"Moments in f32 ({name}): {', '.join(state['f32_leaves'])}.")
    return lines


def smooth(losses: list[float], width: int) -> np.ndarray:
    """The mean of each loss and up to `width - 1` before it."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - width)
    return (total[ends] - total[starts]) / (ends - starts)


def plot(results: dict[str, Any]) -> matplotlib.figure.Figure:
    """Training loss against steps, a line for each variant, and what each adds to the first one's below."""
    figure = matplotlib.figure.Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    variants, styles = results["variants"], ("-", "--", ":")
    width = max(1, results["settings"]["steps"] // 40)
    curves = {name: smooth(variant["losses"], width) for name, variant in variants.items()}
    first = next(iter(curves.values()))
    for i, ((name, variant), style) in enumerate(zip(variants.items(), styles * len(variants), strict=False)):
        steps = np.arange(1, len(curves[name]) + 1)
        final = f", validation {variant['validation_loss']:.3f}" if "validation_loss" in variant else ""
        above.plot(steps, variant["losses"], color=f"C{i}", alpha=0.2, linewidth=0.8)
        above.plot(steps, curves[name], style, color=f"C{i}", linewidth=1.8, label=name + final)
        if i:
            common = min(len(first), len(steps))
            below.plot(steps[:common], 100 * (curves[name][:common] / first[:common] - 1), style, color=f"C{i}")
    s = results["settings"]
    above.set_title(f"{s['preset']} Llama on real text, {s['batch']} x {s['seq']} bytes a step, seed {s['seed']}", loc="left")
    above.set_ylabel("training loss (nats per byte)")
    above.legend(frameon=False)
    below.axhline(0, color="0.6", linewidth=0.8)
    below.set_ylabel(f"above {next(iter(variants))} (%)")
    below.set_xlabel(f"optimizer step; thick lines are means over {width} steps" if width > 1 else "optimizer step")
    below.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure

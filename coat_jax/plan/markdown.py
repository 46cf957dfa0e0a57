"""Committed plans as the tables of the README."""

import dataclasses
from typing import Any

from coat_jax.plan import paper
from coat_jax.plan.devices import GIB
from coat_jax.plan.setting import Setting


def frontier(document: dict[str, Any]) -> str:
    """The rows of `coat-jax plan MODEL --compare --json`, largest peak first."""
    rows = [(setting_of(row), row) for row in document["rows"]]
    lines = [
        "| | compiled peak | parameters and state | operations redone | fits 79.1 GiB less 4 |",
        "|---|---:|---:|---:|---:|",
    ]
    for setting, row in sorted(rows, key=lambda pair: -pair[1]["peak_bytes"]):
        sizes = f"{row['peak_bytes'] / GIB:.1f} GiB | {row['argument_bytes'] / GIB:.1f} GiB"
        lines.append(f"| {setting.label} | {sizes} | {row['recomputed']:.1%} | {'yes' if row['fits'] else 'no'} |")
    return "\n".join(lines)


def papers_table(document: dict[str, Any]) -> str:
    """The rows of `coat-jax plan --table paper`: a line for each model and number of GPUs that is complete."""
    rows = [(setting_of(row), row) for row in document["rows"]]
    labels = list(dict.fromkeys(setting.label for setting in paper.settings()))
    header = ["GiB per GPU, compiled", *labels, "paper: BF16, COAT (GB, measured)"]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    figures = {(p.model, p.gpus): (p.bf16, p.coat) for p in paper.PUBLISHED}
    for model, gpus in dict.fromkeys((setting.model, setting.gpus) for setting, _ in rows):
        cells = {setting.label: paper.peak(row) for setting, row in rows if (setting.model, setting.gpus) == (model, gpus)}
        if set(cells) >= set(labels):
            published = ", ".join("out of memory" if f is None else f"{f:.1f}" for f in figures.get((model, gpus), ()))
            lines.append(f"| {model}, {gpus} x H100 | " + " | ".join([*(cells[name] for name in labels), published]) + " |")
    return "\n".join(lines)


def setting_of(row: dict[str, Any]) -> Setting:
    """The setting that a row of a JSON is of."""
    return Setting(**{field.name: row[field.name] for field in dataclasses.fields(Setting)})

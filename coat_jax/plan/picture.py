"""The picture of a frontier: compiled peak against what is computed a second time."""

from collections.abc import Sequence

import matplotlib.figure

from coat_jax.compiled.devices import GIB
from coat_jax.plan.row import PlanRow


def frontier(rows: Sequence[PlanRow]) -> matplotlib.figure.Figure:
    """Bars of the peak per GPU, arguments and temporaries apart, with the device's memory as a line."""
    rows = [row for row in rows if row.error is None]
    first = rows[0].setting
    figure = matplotlib.figure.Figure(figsize=(9, 0.55 * len(rows) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    names = [row.setting.label for row in rows]
    arguments = [row.argument_bytes / GIB for row in rows]
    rest = [(row.peak_bytes - row.argument_bytes) / GIB for row in rows]
    axes.barh(names, arguments, color="#33628f", label="parameters and optimizer state")
    axes.barh(names, rest, left=arguments, color="#e0a458", label="gradients, activations, temporaries at the peak")
    largest = max(row.memory_bytes for row in rows) / GIB
    axes.axvline(largest, color="#8f3333", linestyle="--", linewidth=1)
    axes.text(largest, -0.62, f"{first.device.upper()}: {largest:.1f} ", color="#8f3333", fontsize=9, ha="right", va="center")
    beside = axes.get_yaxis_transform()  # x in parts of the axes, y in data
    axes.text(1.02, -0.62, "computed twice", transform=beside, fontsize=9, va="center")
    for place, row in enumerate(rows):
        axes.text(row.peak_bytes / GIB - 0.8, place, f"{row.peak_bytes / GIB:.1f}", fontsize=9, ha="right", va="center")
        axes.text(1.02, place, f"{row.recomputed:.0%}", transform=beside, fontsize=9, va="center")
    axes.set_ylim(-1.0, len(rows) - 0.4)
    axes.set_xlim(0, 1.02 * max(largest, *(row.peak_bytes / GIB for row in rows)))
    axes.set_xlabel("compiled peak (GiB per GPU)")
    gpus = f"{first.gpus} GPUs" if first.gpus > 1 else "one GPU"
    axes.set_title(f"{first.model}, {gpus}, batch {first.batch}, sequence {first.seq}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure

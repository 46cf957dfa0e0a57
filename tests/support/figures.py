"""The figures of README and docs/, each block made from a JSON of `results/`. `make figures` writes them again.

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`. To change a number, change the JSON: its `command` says how.
"""

import dataclasses
import json
import re
import statistics
from collections.abc import Callable
from typing import Any

import pages

from coat_jax.compiled.devices import GIB
from coat_jax.plan import paper
from coat_jax.plan.config import PlanConfig
from coat_jax.studies import codec_table, report

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Document = dict[str, Any]


def load(name: str) -> Document:
    """The document results/name.json."""
    return json.loads((pages.ROOT / "results" / f"{name}.json").read_text())


def front() -> str:
    """What one gets, in three numbers of three kinds."""
    document, planned = load("front_page"), load("plan_llama2_7b")["rows"]
    rows, sizes = document["rows"], document["sizes"]
    peak = {name: f"{row['peak_bytes'] / GIB:.1f} GiB" for name, row in rows.items()}
    less = 1 - rows["after"]["peak_bytes"] / rows["before"]["peak_bytes"]
    rate = {setting_of(row).label: f"{row['modelled_tokens_per_second'] / 1000:.1f} k/s" for row in planned}
    state = load("codecs")["codecs"]["coat"]["bytes_per_parameter"]
    step = (
        f"peak memory of one training step on an H100: the program below with {rows['after']['parameters'] / 1e6:.0f} M "
        f"parameters ({sizes['layers']} layers, {sizes['width']} wide, float32; computed in bfloat16), "
        f"{document['batch']} x {document['sequence']} tokens"
    )
    return table(
        ["", "plain Flax, `optax.adamw`", "with coat-jax", "kind"],
        [
            [step, peak["before"], f"**{peak['after']}** ({less:.0%} less)", "compiled"],
            ["AdamW's moments of float32 parameters", "8 B/parameter", f"**{state:.2f}** B/parameter", "measured"],
            [
                "tokens of Llama-2-7B on one H100, 4 x 2048 in a step",
                f"{rate['BF16, optax.adamw, dots policy']} with the usual remat policy",
                f"**{rate['lean, coat moments']}**",
                "modelled",
            ],
        ],
        align="left",
    )


def swap() -> str:
    """The two programs of the quick start, before and after its diff."""
    document = load("front_page")
    names = {"before": "before", "after": "after the change"}
    cells = [
        [names[name], *(f"{row[key] / GIB:.1f} GiB" for key in ("peak_bytes", "argument_bytes")), str(row["fp8_products"])]
        for name, row in document["rows"].items()
    ]
    sizes = ", ".join(f"{name} {size:,}" for name, size in document["sizes"].items())
    header = ["", "compiled peak", "of it parameters and optimizer state", "FP8 products"]
    shapes = (
        f"{document['batch']} sequences of {document['sequence']} tokens; {sizes}; float32 parameters, bfloat16 computation."
    )
    return f"{table(header, cells)}\n\n{shapes[0].upper()}{shapes[1:]}"


def gain() -> str:
    """What one gets, in four rows: compiled peaks, the largest batches, optimizer state, losses."""
    planned = {setting_of(row).label: row for row in load("plan_llama2_7b")["rows"]}
    fits = dict.fromkeys(planned) | {
        setting_of(row).label: row["largest_batch"] for row in load("plan_paper")["rows"] if of_7b(row, gpus=1)
    }
    peak = {label: f"{row['peak_bytes'] / GIB:.1f} GiB" for label, row in planned.items()}
    plain, dots, lean, fused = (
        "BF16, optax.adamw",
        "BF16, optax.adamw, dots policy",
        "lean, coat moments",
        "lean, coat moments, fused",
    )
    compare, recipes = load("compare"), load("recipes")["variants"]
    state = load("codecs")["codecs"]["coat"]["bytes_per_parameter"]
    kept = [
        compare["plain_flax_kept_bytes"],
        compare["variants"]["coat"]["kept_bytes"],
        compare["variants"]["lean"]["kept_bytes"],
    ]
    above = {name: recipes[name]["above_first_percent"]["mean"] for name in ("coat", "lean")}
    return table(
        ["", "plain Flax, `optax.adamw`", "with this library", ""],
        [
            [
                "Llama-2-7B, a step of 4 x 2048 tokens",
                f"{peak[plain]}; {peak[dots]} with the usual remat policy",
                f"**{peak[lean]}**; **{peak[fused]}** with the optimizer in the backward pass",
                "compiled",
            ],
            [
                "its largest batch on one H100",
                f"{fits[plain]} sequence; {fits[dots]} with the policy",
                f"**{fits[lean]}**" + (f"; **{fits[fused]}** with the optimizer in the backward pass" if fits[fused] else ""),
                "compiled",
            ],
            ["AdamW's moments of f32 parameters", "8 B/parameter", f"**{state:.2f}** B/parameter", "measured"],
            [
                "kept for the backward pass by a small Llama",
                f"{kept[0]:,.0f} B/token/layer",
                f"{kept[1]:,.0f} with `coat()`, **{kept[2]:,.0f}** with `lean()`",
                "compiled",
            ],
            [
                f"its validation loss, mean of {len(recipes['bf16']['validation_loss'])} seeds",
                f"{recipes['bf16']['mean']:.4f} nats/byte",
                f"{above['coat']:+.2f} % with `coat()`, {above['lean']:+.2f} % with `lean()`",
                "measured",
            ],
        ],
        align="left",
    )


def compare() -> str:
    """The variants of `coat-jax compare` side by side."""
    results = load("compare")
    return table(["", *results["variants"]], [[label.strip(), *texts] for label, texts in report.rows(results)])


def recipes() -> str:
    """Mean losses over the seeds of `coat-jax recipes`, and how sure they are."""
    variants = load("recipes")["variants"]
    rows, notes = [], []
    for name, variant in variants.items():
        above = variant["above_first_percent"]
        more = ["", ""] if name == "bf16" else [f"{above['mean']:+.2f} %", f"{above['least']:+.2f} to {above['most']:+.2f} %"]
        rows.append([name, f"{variant['mean']:.4f}", *more])
        if name != "bf16":
            pairs = zip(variant["validation_loss"].values(), variants["bf16"]["validation_loss"].values(), strict=True)
            each = [100 * (loss / base - 1) for loss, base in pairs]
            error = statistics.stdev(each) / len(each) ** 0.5
            first = statistics.mean(each[:5])
            notes.append(f"`{name}`: standard error {error:.2f} percent; {first:+.2f} % over the first five seeds alone")
    shown = table(["recipe", "mean validation loss (nats/byte)", "above bf16", "by seed"], rows)
    return "\n".join([shown, "", *(f"- {note}." for note in notes)])


def codecs() -> str:
    """Errors and losses of every codec, and what they say."""
    results = load("codecs")
    rows = []
    for name, row in results["codecs"].items():
        difference = "" if name == "float32" else "{:+.4f} ± {:.4f}".format(*codec_table.loss_difference(results, name))
        if name == "float32":
            continue
        if "one_shot" not in row:
            rows.append(["f32, initial weights changed by 1e-6", "8", *[""] * 6, difference])
            continue
        errors = [row["one_shot"], row["closed_loop"]["0.95"], row["closed_loop"]["0.999"]]
        passed = ["passed" if results["verdicts"][name][test] else "failed" for test in ("dormant", "drop")]
        real = percent(results["real_moments"]["relative_error"][name]["update"])
        texts = [" / ".join(map(percent, column)) for column in errors]
        rows.append([f"`{name}`", f"{row['bytes_per_parameter']:.3f}", *texts, *passed, real, difference])
    header = ["codec", "B/parameter", "one shot", "closed loop, b2 0.95", "b2 0.999", "dormant", "drop", "real moments"]
    ratio = results["real_moments"]["mean_squared_error_plain_fp8_over_coat"]
    worst = max(row["dormant"]["live_error_ratio_max"] for row in results["codecs"].values() if "dormant" in row)
    return "\n".join(
        [
            table([*header, "loss above f32 AdamW's"], rows),
            "",
            f"- COAT's expansion makes the mean squared error on real moments {ratio:.1f} times smaller than that of plain FP8 "
            "(the paper reports 1.63 times).",
            f"- Dormant: half of every group gets no gradient for {results['last']:,} steps. Those weights then stand still, "
            f"and the error of the others stays under twice what it is without (at most {worst:.1f} times here).",
        ]
    )


def optimizer_cost() -> str:
    """What a step costs on a CPU."""
    document = load("optimizer_cost")
    ratio = document["ratio_to_optax_adamw"]
    return (
        f"- On a CPU a step of `coat_adamw` over {document['parameters'] / 1e6:.0f} million parameters takes "
        f"{ratio['coat']:.1f} (`COAT`) and {ratio['log_relative']:.1f} (`LOG_RELATIVE`) times as long as one of `optax.adamw`."
    )


def frontier() -> str:
    """The rows of `coat-jax plan MODEL --compare --json`, largest peak first."""
    rows = []
    for row in sorted(load("plan_llama2_7b")["rows"], key=lambda row: -row["peak_bytes"]):
        sizes = [f"{row[key] / GIB:.1f} GiB" for key in ("peak_bytes", "argument_bytes")]
        fits = "yes" if row["fits"] else "no"
        rate = f"{row['modelled_tokens_per_second'] / 1000:.1f}"
        rows.append([setting_of(row).label, *sizes, f"{row['recomputed']:.1%}", fits, rate])
    header = ["", "compiled peak", "parameters and state", "operations redone", "fits 79.1 GiB less 4", "modelled k tokens/s"]
    return table(header, rows)


def papers_table() -> str:
    """The rows of `coat-jax plan --table paper`: a line for each model and number of GPUs."""
    rows = [(setting_of(row), row) for row in load("plan_paper")["rows"]]
    labels = list(dict.fromkeys(setting.label for setting in paper.settings()))
    figures = {(p.model, p.gpus): (p.bf16, p.coat) for p in paper.PUBLISHED}
    lines = []
    for model, gpus in sorted(dict.fromkeys((setting.model, setting.gpus) for setting, _ in rows), key=size):
        cells = {setting.label: paper.peak(row) for setting, row in rows if (setting.model, setting.gpus) == (model, gpus)}
        published = ", ".join("out of memory" if f is None else f"{f:.1f}" for f in figures.get((model, gpus), ()))
        lines.append([f"{model}, {gpus} x H100", *(cells.get(label, "") for label in labels), published])
    return table(["GiB per GPU, compiled", *labels, "paper: BF16, COAT (GB, measured)"], lines)


def fused_curve() -> str:
    """How far the step with the optimizer in its backward pass ends from the ordinary one."""
    document = load("fused_curve")
    runs, steps = len(document["curves"]["lean"]), document["settings"]["steps"]
    return (
        f"- `lean()`, {runs} seeds of {steps} steps on the same text: training with the optimizer in the backward pass ends "
        f"{document['distance']:.4f} nats/byte from the ordinary step, where seeds end {document['seed_noise']:.4f} apart."
    )


def kernels() -> str:
    """The static table of `coat-jax bench`."""
    rows = []
    for row in load("kernels_static")["rows"]:
        bytes_moved = [f"{row[key]:.3f}" for key in ("moved", "least")]
        rows.append([row["name"], *bytes_moved, str(row["registers"]), f"{row['shared_memory']:,}", str(row["spills"])])
    header = ["kernel, compiled for an H100", "bytes moved per element", "least", "registers", "shared memory (bytes)"]
    return table([*header, "spilled (bytes)"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (front, swap, gain, compare, recipes, fused_curve, codecs, optimizer_cost, frontier, papers_table, kernels)
}
"""What each block between `<!-- figures: NAME -->` and `<!-- end -->` holds."""


def table(header: list[str], rows: list[list[str]], align: str = "right") -> str:
    """A Markdown table."""
    rule = "|---|" + ("---:|" if align == "right" else "---|") * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def percent(share: float) -> str:
    """A share in percent, two digits."""
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def setting_of(row: Document) -> PlanConfig:
    """The setting that a row of a plan is of."""
    return PlanConfig(**{field.name: row[field.name] for field in dataclasses.fields(PlanConfig)})


def of_7b(row: Document, gpus: int) -> bool:
    """Whether a row of a plan is of Llama-2-7B on so many GPUs."""
    return (row["model"], row["gpus"]) == ("llama2-7b", gpus)


def size(case: tuple[str, int]) -> tuple[int, int]:
    """Orders models by their parameters, then by GPUs."""
    model, gpus = case
    return int(re.findall(r"(\d+)b", model)[0]), gpus


def rendered(text: str) -> str:
    """The page with every block made again."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for page in pages.PAGES:
        page.write_text(rendered(page.read_text()))

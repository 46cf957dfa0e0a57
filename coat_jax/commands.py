"""The commands of `coat-jax`: each reads its arguments and calls the one function that does the work."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import coat_jax

app = typer.Typer(
    name="coat-jax",
    help="FP8 optimizer states and FP8 activations for JAX, Flax and Optax.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"coat-jax {coat_jax.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """`main` of `coat_jax.cli` reads --traceback itself; it is declared here so that --help shows it."""


@app.command()
def compare(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help="More text for --data.")] = None,
    *,
    data: Annotated[
        list[Path] | None, typer.Option(metavar="PATH...", help="Text files or folders [standard library].")
    ] = None,
    variants: Annotated[
        str, typer.Option("--variants", "--arms", help="What to train, BF16 first: names with commas between.")
    ] = "bf16,coat",
    preset: Annotated[str, typer.Option(help="Shape of the model.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 400,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens (bytes) in a sequence.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="The highest; a warm-up leads to it, a cosine to a tenth of it.")] = 4e-3,
    seed: Annotated[int, typer.Option(help="Initial values, order and split of the text.")] = 0,
    fused: Annotated[bool, typer.Option("--fused", help="Update each layer inside the backward pass, in all.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")] = Path("out"),
) -> None:
    """Train the same Llama in BF16 and with COAT on real text, and show the two side by side."""
    from coat_jax.studies import compare as command

    names = tuple(name if name.endswith("+fused") or not fused else f"{name}+fused" for name in variants.split(","))
    settings = command.StudyConfig(preset, names, steps, batch, seq, seed, learning_rate)
    command.run(settings, data=[*(data or ()), *(paths or ())], out=out, command=_typed())


@app.command()
def recipes(
    *,
    data: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="A text file or folder; repeatable [standard library].")
    ] = None,
    variants: Annotated[
        str, typer.Option("--variants", "--arms", help="What to train, BF16 first: names with commas between.")
    ] = "bf16,coat,lean",
    preset: Annotated[str, typer.Option(help="Shape of the model.")] = "tiny",
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 5,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 500,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens (bytes) in a sequence.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="The highest; a warm-up leads to it, a cosine to a tenth of it.")] = 2e-3,
    out: Annotated[Path, typer.Option(help="The JSON file; runs that it holds are not repeated.")] = Path("out/recipes.json"),
) -> None:
    """Train every recipe from several seeds on real text and show how far its mean loss is from BF16's."""
    from coat_jax.studies import recipe_study

    settings = recipe_study.StudyConfig(preset, tuple(variants.split(",")), steps, batch, seq, 0, learning_rate)
    recipe_study.run(settings, seeds=seeds, data=tuple(data or ()), out=out, command=_typed())


@app.command()
def codecs(
    *,
    data: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="A text file or folder; repeatable [standard library].")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of the small Llama with each codec.")] = 5,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 150,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens (bytes) in a sequence.")] = 64,
    groups: Annotated[int, typer.Option(help="Groups of 128 elements in each case on random gradients.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for codecs.json; what it holds is not measured again.")] = Path("out"),
) -> None:
    """Measure every way of storing Adam's moments: errors, dormant elements, drops, and the loss of a small Llama."""
    from coat_jax.studies import codec_table as command

    settings = command.StudyConfig(steps=steps, batch=batch, seq=seq)
    command.run(settings, seeds=seeds, groups=groups, data=tuple(data or ()), out=out, command=_typed())


def _typed() -> str:
    """The command as it was typed."""
    return shlex.join(["coat-jax", *sys.argv[1:]])


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A preset, as llama2-7b.")] = None,
    *,
    gpus: Annotated[int, typer.Option(help="GPUs that share the step, fully sharded, 1 to 64.")] = 1,
    device: Annotated[str, typer.Option(help="h100, h200, or a JSON file that describes another.")] = "h100",
    batch: Annotated[int | None, typer.Option(help="Sequences of a step over all GPUs [one for each].")] = None,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    recipe: Annotated[str, typer.Option(help="lean, coat, blocks, bf16, or plain for plain Flax.")] = "lean",
    codec: Annotated[str, typer.Option(help="Moments: coat, log_relative, ..., or optax for optax.adamw.")] = "coat",
    master: Annotated[str | None, typer.Option(help="bf16+8, bf16+16 or bf16-stochastic [none].")] = None,
    remat: Annotated[str, typer.Option(help="none, layer, or dots (with plain).")] = "none",
    fused: Annotated[bool, typer.Option("--fused", help="Update each layer inside the backward pass.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Every combination worth comparing, sorted by peak.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Search for the largest batch that fits.")] = False,
    reserve: Annotated[float, typer.Option(help="GiB per GPU to leave free.")] = 4.0,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the rows; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture.")] = None,
    table: Annotated[
        str | None, typer.Option(help="paper: all of its table, into --json, which an interrupted run continues.")
    ] = None,
) -> None:
    """Compile the training step of a Llama for GPUs that need not be here: its memory, products and exchanges.

    A step of a 7B model takes 10 to 30 seconds on two cores, --compare eight of them, --fit four for each row, --table paper an
    hour. Nothing runs on a GPU.
    """
    from coat_jax.compiled import PlanError
    from coat_jax.plan import command, paper
    from coat_jax.plan.config import PlanConfig

    if table is not None:
        if table != "paper" or json in (None, "-"):
            raise ValueError(f"plan: table={table!r}; use --table paper --json FILE, which an interrupted run continues")
        paper.run(Path(json), output=command.PlanOutput(json, plot, reserve), typed=_typed())
        return
    if model is None:
        raise ValueError("plan: no MODEL; give a preset such as llama2-7b")
    setting = PlanConfig(model, recipe, codec, master, remat, fused, gpus if batch is None else batch, seq, gpus, device)
    output = command.PlanOutput(json, plot, reserve)
    try:
        rows = command.run(setting, compare=compare, fit=fit, output=output, command=_typed())
    except PlanError as error:
        print(f"coat-jax: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if all(row.error for row in rows):
        raise typer.Exit(1)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A model: config.json and safetensors files.")],
    *,
    format: Annotated[
        str, typer.Option(help="compressed-tensors-channel, compressed-tensors-block or deepseek-blocks.")
    ] = "compressed-tensors-channel",
    out: Annotated[Path, typer.Option(help="A new folder.")],
) -> None:
    """Write a model with the weights of its layers in FP8, in a format that inference engines read."""
    from coat_jax.pretrained import exporting, loading

    config, params = loading.load(folder)
    print(exporting.export(out, config, params, format=format, like=folder))


@app.command()
def bench(
    *,
    only: Annotated[str, typer.Option(help="Kernels whose names hold this.")] = "",
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the rows; - is standard output.")] = None,
    calibrate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the GPU's measured ceilings, for plan --device FILE.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds after which no row is begun.")] = 420.0,
) -> None:
    """Check and time every kernel on a Hopper GPU; without one, show what the compiler makes of them for an H100."""
    from coat_jax.bench import run as command
    from coat_jax.compiled import PlanError

    try:
        command.run(only, command.BenchOutput(json, calibrate, _typed()), budget)
    except PlanError as error:
        print(f"coat-jax: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Compile nothing for an H100.")] = False,
) -> None:
    """Say what works on this machine and what to install or change; status 1 if training would not run.

    Takes about a minute with the plan extra, whose compiler tries every kernel, and seconds without it or with --quick.
    """
    from coat_jax import doctor as command

    findings = command.run(as_json=json, compile_kernels=not quick)
    if any(finding.verdict is command.Verdict.FAIL for finding in findings):
        raise typer.Exit(1)

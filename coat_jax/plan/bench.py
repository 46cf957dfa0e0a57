"""`coat-jax bench`: what each kernel moves, against the least that it could, and what the compiler made of it."""

import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from coat_jax.optim import coat_adamw, codecs
from coat_jax.plan.compile import compile_for
from coat_jax.quant import E4M3, PerGroup, PowerExpansion, QuantSpec, dequantize, quantize
from coat_jax.train.provenance import compact, provenance

SHAPE = (4096, 11008)
"""The gate projection of Llama-2-7B."""
STATIC = (
    "Compiled for an H100 on this machine, not measured: no kernel was run. Bytes are those of the copies that a kernel issues."
)
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
      name: of the row.
      least: bytes per element that any implementation moves.
      make: implementation -> (function, its abstract arguments, which of them are donated).
    """

    name: str
    least: float
    make: Callable[[str | None], tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel as compiled: bytes per element moved and least possible, registers, shared memory and spills in bytes."""

    name: str
    moved: float
    least: float
    registers: int
    shared_memory: int
    spills: int
    temporaries: int


def cases() -> list[Case]:
    """Every kernel of the library."""
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    rows = []
    for size, scale, expansion in ((16, bf16, None), (128, f32, None), (128, f32, PowerExpansion())):
        spec = QuantSpec(E4M3, PerGroup(size), expansion, scale_dtype=scale)
        least = 3 + (spec.scale_dtype.itemsize + spec.has_exponent) / size
        rows.append(Case(f"quantize, {spec}", least, functools.partial(_quantize, spec)))
        rows.append(Case(f"dequantize, {spec}", least, functools.partial(_dequantize, spec)))
    for codec, extra in (("coat", 5.0), ("log_relative", 4.5)):
        for master, more in ((None, 0), ("bf16+8", 2), ("bf16-stochastic", 0)):
            least = 10 + 4 * extra / 128 + more
            rows.append(Case(f"AdamW, {codec}, master {master}", least, functools.partial(_step, codec, master)))
    return rows


def _quantize(spec: QuantSpec, implementation: str | None) -> Any:
    return (
        functools.partial(quantize, spec=spec, implementation=implementation),
        (jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),),
        (),
    )


def _dequantize(spec: QuantSpec, implementation: str | None) -> Any:
    stored = jax.eval_shape(functools.partial(quantize, spec=spec), jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16))
    return functools.partial(dequantize, implementation=implementation), (stored,), ()


def _step(codec: str, master: str | None, implementation: str | None) -> Any:
    optimizer = coat_adamw(3e-4, b2=0.95, codec=codecs.named(codec), master=master, implementation=implementation)
    params = {"kernel": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    return optimizer.update_and_apply, (params, jax.eval_shape(optimizer.init, params), params), (1, 2)


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """What the process writes to its outputs meanwhile, whoever writes it: the kernel compiler reports there."""
    texts: list[str] = []
    before = {name: os.environ.get(name) for name in ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")}
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = [os.dup(1), os.dup(2)]
        os.environ.update(dict.fromkeys(before, "1"))
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield texts
        finally:
            sys.stdout.flush()
            for number, saved in zip((1, 2), kept, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))


def compiled(case: Case) -> Row:
    """The row of a kernel, compiled for an H100.

    Raises:
      ValueError: a jax without the kernels' interpreter, by which copies are counted.
      PlanError: the `plan` extra is not installed.
    """
    function, args, donated = case.make("interpret")
    moved = sum(int(n) for n in re.findall(r"bytes_accessed=(\d+)", str(jax.make_jaxpr(function)(*args))))
    function, args, donated = case.make("pallas")
    with _said() as texts:
        program = compile_for("h100", function, *args, donate_argnums=donated)

    def number(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, texts[0])), default=0)

    return Row(
        name=case.name,
        moved=moved / (SHAPE[0] * SHAPE[1]),
        least=case.least,
        registers=number(r"Used (\d+) registers"),
        shared_memory=number(r"smem_scratch_bytes=(\d+)"),
        spills=number(r"(\d+) bytes spill stores"),
        temporaries=program.temp_bytes,
    )


def run(*, only: str = "", json: str | None = None, command: str = "") -> list[Row]:
    """Compiles the kernels whose names hold `only`, prints their table, and writes JSON to the file `json`."""
    rows = [compiled(case) for case in cases() if only in case.name]
    table = Table("kernel", "bytes/element", "least", "registers", "shared memory", "spills", "temporaries", title=STATIC)
    for row in rows:
        counts = (row.registers, row.shared_memory, row.spills, row.temporaries)
        table.add_row(row.name, f"{row.moved:.3f}", f"{row.least:.3f}", *(f"{n:,}" for n in counts))
    Console().print(table)
    if json:
        record = {
            **provenance(command, PACKAGES),
            "note": STATIC,
            "shape": SHAPE,
            "rows": [dataclasses.asdict(r) for r in rows],
        }
        Path(json).write_text(compact(record), encoding="utf-8")
    return rows

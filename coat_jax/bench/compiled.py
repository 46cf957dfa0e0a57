"""The static table of kernels: what each moves against the least that it could, and what the compiler made of it.

Compiled for an H100, not measured: no kernel runs.
"""

import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from coat_jax.bench.kernels import KernelSpec, matching
from coat_jax.bench.table import table
from coat_jax.compiled.compile import compile_for
from coat_jax.compiled.program import Program
from coat_jax.results import provenance, write_json
from pallas_kernels import jaxprs

NOTE = (
    "Compiled for an H100 on this machine, not measured: no kernel was run. Bytes are those of the copies that a kernel issues."
)
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
_REPORTS = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES", "MOSAIC_GPU_DUMP_PTX")
_E4M3 = re.compile(r"wgmma\.mma_async\S*\.e4m3\.")


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel as compiled.

    Attributes:
      name: of the case.
      moved, least: bytes per element.
      registers, spills: of a thread, in bytes the second; None of a kernel that this process had compiled before.
      shared_memory: bytes of a block; None where this jax does not tell.
      temporaries: bytes of device memory.
      wgmma: of a product, how many instructions of its PTX multiply e4m3 operands on the tensor cores; None of others.
    """

    name: str
    moved: float
    least: float
    registers: int | None
    shared_memory: int | None
    spills: int | None
    temporaries: int
    wgmma: int | None = None


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """What the process writes to its outputs meanwhile, whoever writes it: the kernel compiler reports there."""
    texts: list[str] = []
    before = {name: os.environ.get(name) for name in _REPORTS}
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


def moved(function: Callable[..., Any], *args: Any) -> int:
    """Bytes that the kernels of a function move: what their launches say of the copies that they issue."""
    made = jaxprs.equations(jax.make_jaxpr(function)(*args).jaxpr)
    costs = ((equation.params.get("cost_estimate"), times) for equation, times in made)
    return sum(times * cost.bytes_accessed for cost, times in costs if cost is not None)


def reported(function: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> tuple[Program, str]:
    """A function compiled for an H100, and what the kernel compiler says of its kernels: resources, ptxas' counts, PTX.

    It says so once in a process: nothing of a kernel that was compiled before.

    Raises:
      PlanError: the `plan` extra is not installed.
    """
    with _said() as texts:
        program = compile_for("h100", function, *args, donate_argnums=donated)
    return program, texts[0]


@functools.cache
def reported_case(case: KernelSpec) -> tuple[Program, str]:
    """`reported` of a kernel of the table."""
    return reported(case.make("pallas"), *case.abstract, donated=case.donated)


def compiled(case: KernelSpec) -> CompiledKernel:
    """The row of a kernel, compiled for an H100.

    Raises:
      PlanError: the `plan` extra is not installed.
    """
    program, text = reported_case(case)

    def number(pattern: str) -> int | None:
        return max((int(n) for n in re.findall(pattern, text)), default=None)

    return CompiledKernel(
        name=case.name,
        moved=moved(case.make("pallas"), *case.abstract) / case.elements,
        least=case.least,
        registers=number(r"Used (\d+) registers"),
        shared_memory=number(r"smem_scratch_bytes=(\d+)"),
        spills=number(r"(\d+) bytes spill stores"),
        temporaries=program.temp_bytes,
        wgmma=len(_E4M3.findall(text)) if case.flops else None,
    )


def shown(rows: Sequence[CompiledKernel]) -> str:
    """The rows as a table."""
    heads = ("kernel", "bytes/element", "least", "registers", "shared memory", "spills", "temporaries", "e4m3 wgmma")
    counts = [(row.registers, row.shared_memory, row.spills, row.temporaries, row.wgmma) for row in rows]
    texts = [["" if n is None else f"{n:,}" for n in some] for some in counts]
    return table(heads, [(r.name, f"{r.moved:.3f}", f"{r.least:.3f}", *some) for r, some in zip(rows, texts, strict=True)])


def run(
    *, only: str = "", json: str | None = None, command: str = "", say: Callable[[str], None] = print
) -> list[CompiledKernel]:
    """Compiles the kernels whose names hold `only`, says their table, and writes JSON to the file `json`, or "-".

    Raises:
      ValueError: no kernel's name holds `only`.
      PlanError: the `plan` extra is not installed.
    """
    rows = [compiled(case) for case in matching(only)]
    if json:
        record = {**provenance(command, PACKAGES), "note": NOTE, "rows": [dataclasses.asdict(r) for r in rows]}
        write_json(json, record)
    say(NOTE + "\n\n" + shown(rows))
    return rows

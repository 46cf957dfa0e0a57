"""`PlanRow`: what one setting costs, as compiled and as modelled; a line of every table and of the JSON."""

import dataclasses
import time
from typing import Any

from coat_jax.compiled import roofline
from coat_jax.compiled.devices import GIB
from coat_jax.compiled.program import Program
from coat_jax.plan.config import PlanConfig
from coat_jax.plan.step import training_step

RESERVE_BYTES = 4 * GIB
"""Kept free for what a compiled peak leaves out: CUDA context, workspaces of cuBLAS and NCCL, fragmentation."""


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One setting, compiled.

    Attributes:
      setting: what was compiled.
      error: why it could not be; the other fields are empty then.
      peak_bytes, argument_bytes, temp_bytes: of the compiled program, per GPU.
      kept_bytes: what the scan over layers keeps for the backward pass, per GPU.
      products: number of products in the program's text by kind ("f8", "bf16", "attention", ...).
      flops: operations of one step per GPU by kind.
      recomputed: share of the needed operations that is done a second time.
      collective_bytes: bytes of one step by kind and dtype of exchange.
      step_seconds: modelled, not measured: see `roofline`.
      compile_seconds: how long XLA took.
      largest_batch: sequences over all GPUs of the largest step that fits, where it was asked for; 0 where none does.
    """

    setting: PlanConfig
    error: str | None = None
    peak_bytes: int = 0
    argument_bytes: int = 0
    temp_bytes: int = 0
    kept_bytes: int = 0
    products: dict[str, int] = dataclasses.field(default_factory=dict)
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    recomputed: float = 0.0
    collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    step_seconds: float = 0.0
    compile_seconds: float = 0.0
    largest_batch: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return self.setting.gpu.memory_bytes

    def fits(self, reserve_bytes: int = RESERVE_BYTES) -> bool:
        """Whether the compiled peak leaves `reserve_bytes` of the device's memory free."""
        return self.error is None and self.peak_bytes + reserve_bytes <= self.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Modelled tokens per second per GPU."""
        return self.setting.tokens / self.setting.gpus / self.step_seconds if self.step_seconds else 0.0

    def to_json(self, reserve_bytes: int = RESERVE_BYTES) -> dict[str, Any]:
        """A flat object of the settings and the figures."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "setting"}
        modelled = {"modelled_step_seconds": found.pop("step_seconds"), "modelled_tokens_per_second": self.tokens_per_second}
        fits = {"fits": self.fits(reserve_bytes), "reserve_bytes": reserve_bytes}
        return dataclasses.asdict(self.setting) | found | modelled | fits


PATTERN = {"error": object, "peak_bytes": float, "largest_batch": object}
PATTERN |= {field.name: field.type if field.type in (str, int, bool) else object for field in dataclasses.fields(PlanConfig)}
"""What a row of a plan's JSON is like."""


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the rows of a plan's JSON apart: the settings."""
    return tuple(row[field.name] for field in dataclasses.fields(PlanConfig))


def plan(setting: PlanConfig) -> PlanRow:
    """Compiles the step of one setting.

    A setting that cannot be compiled is a row with an error, so that the others of a table still come out.

    Raises:
      PlanError: no CUDA plug-in is installed.
    """
    start = time.perf_counter()
    try:
        program = training_step(setting).compile(setting)
    except (ValueError, TypeError, NotImplementedError) as error:
        return PlanRow(setting, error=_one_line(error))
    except RuntimeError as error:
        if type(error) is not RuntimeError and not _from_xla(error):
            raise
        return PlanRow(setting, error=_one_line(error))
    return read(setting, program, time.perf_counter() - start)


def read(setting: PlanConfig, program: Program, compile_seconds: float) -> PlanRow:
    """The row of a compiled program."""
    flops = program.flops()
    return PlanRow(
        setting,
        peak_bytes=program.peak_bytes,
        argument_bytes=program.argument_bytes,
        temp_bytes=program.temp_bytes,
        kept_bytes=sum(kept.nbytes for kept in program.kept),
        products={kind: program.count(kind) for kind in flops},
        flops=flops,
        recomputed=sum(flops.values()) / setting.needed_flops() - 1,
        collective_bytes=program.collective_bytes(),
        step_seconds=roofline.seconds(program, setting.gpu).total,
        compile_seconds=compile_seconds,
    )


def _from_xla(error: Exception) -> bool:
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

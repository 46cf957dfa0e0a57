"""`explain_memory`: what a model keeps for its backward pass, as a table."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.compiled.compile import compile_for
from coat_jax.compiled.devices import Device
from coat_jax.compiled.hlo import Instruction
from coat_jax.compiled.program import Program
from coat_jax.compiled.residuals import Residual, in_backward, kept_in, kept_outside


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What a compiled program keeps for its backward pass. Printed, it is a table.

    Attributes:
      kept: one entry per array, those with a row per layer first.
      program: the compiled program itself.
    """

    kept: tuple[Residual, ...]
    program: Program

    @property
    def nbytes(self) -> int:
        """Bytes kept, of all layers."""
        return sum(k.nbytes for k in self.kept)

    @property
    def fp8_bytes(self) -> int:
        """Bytes of the arrays of one byte per element."""
        return sum(k.nbytes for k in self.kept if k.fp8)

    def __repr__(self) -> str:
        names = _without_common_scope([k.name for k in self.kept])
        rows = [("kept for the backward pass", "dtype", "shape", "layers", "MiB")]
        for name, k in zip(names, self.kept, strict=True):
            rows.append((name, k.dtype, "x".join(map(str, k.shape)) or "-", str(k.layers), _mib(k.nbytes)))
        totals = {
            "FP8 in all": self.fp8_bytes,
            "others in all": self.nbytes - self.fp8_bytes,
            "compiled peak of the program": self.program.peak_bytes,
        }
        rows += [(name, "", "", "", _mib(nbytes)) for name, nbytes in totals.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = ["  ".join(f"{cell:{'<' if c < 2 else '>'}{widths[c]}}" for c, cell in enumerate(row)) for row in rows]
        rule = "-" * len(text[0])
        return "\n".join([text[0], rule, *text[1:-3], rule, *text[-3:]])


def explain_memory(fn: Callable[..., Any], *args: Any, device: str | Device | None = None) -> MemoryReport:
    """Compiles fn with its backward pass and lists what crosses from the one to the other: names, shapes, dtypes, bytes.

    Args:
      fn: a loss, differentiated here in its first argument as `jax.grad` does: its result is one floating-point number, or a
        pair (loss, aux) as for `has_aux`; or a training step that differentiates by itself.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      device: None compiles for what this process computes on; "h100", "h200" or a description for a GPU that is not here.

    Returns:
      A `MemoryReport`, which prints as a table. Arguments of fn, parameters among them, do not count. Shapes are one layer's.

    Raises:
      PlanError: a device is named and the CUDA plug-in is not installed.
      ValueError: fn is neither: nothing in it is a backward pass, and its result is no loss.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import explain_memory
      >>> def loss(w, x):
      ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
      >>> report = explain_memory(loss, jnp.ones((6, 64, 64)), jnp.ones((8, 64)))
      >>> report.nbytes >= 6 * 8 * 64 * 4, report.fp8_bytes
      (True, 0)
    """
    result = jax.eval_shape(fn, *args)
    if _is_number(result):
        return _report(jax.value_and_grad(fn), args, device)
    # A pair whose first is a number may be (loss, aux), or what a step returns: (loss, new parameters).
    if not any(map(in_backward, _instructions(report := _report(fn, args, device)))):
        if not (isinstance(result, tuple) and len(result) == 2 and _is_number(result[0])):
            raise ValueError(
                f"explain_memory: fn returns {_described(result)} and has no backward pass; give a loss that returns one "
                "floating-point number or (loss, aux), or a step that takes gradients"
            )
        return _report(jax.value_and_grad(fn, has_aux=True), args, device)
    return report


def _report(step: Callable[..., Any], args: tuple, device: str | Device | None) -> MemoryReport:
    program = Program.of(jax.jit(step).lower(*args).compile()) if device is None else compile_for(device, step, *args)
    return MemoryReport(kept_in(program.module) + kept_outside(program.module), program)


def _is_number(result: Any) -> bool:
    """Whether it is one floating-point number, as a loss is."""
    return getattr(result, "shape", None) == () and jnp.issubdtype(result.dtype, jnp.floating)


def _instructions(report: MemoryReport) -> Iterator[Instruction]:
    return (i for computation in report.program.module.computations.values() for i in computation.instructions.values())


def _described(result: Any) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(result)[:4]) or "nothing"


def _without_common_scope(names: list[str]) -> list[str]:
    """The names without the scopes that all with scopes begin with, such as the model's own."""
    paths = [name.split("/") for name in names]
    common = os.path.commonprefix([path[:-1] for path in paths if len(path) > 1])
    return ["/".join(path[len(common) :] if path[: len(common)] == common else path) for path in paths]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f}"

"""Rows of the bench: what was timed, what it reached of what the device can do, or why there is nothing."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from coat_jax.bench.harness import Contender
from coat_jax.bench.table import table


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """One thing that was timed.

    Attributes:
      name: of the row.
      seconds: median of one call; None where it was not timed.
      low, high: the shortest and the longest sample.
      reached: bytes per second, or operations per second of a product.
      share: of the device's ceiling, measured in the same run.
      plain: median seconds of the same by plain XLA, in turns with it.
      check: how its results compare with the reference's.
      modelled: seconds by the step-time model on the measured ceilings.
      error: what went wrong, or that time was up.
    """

    name: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    reached: float | None = None
    share: float | None = None
    plain: float | None = None
    check: str = ""
    modelled: float | None = None
    error: str = ""

    @classmethod
    def timed(cls, name: str, samples: list[float], **more: Any) -> "BenchRow":
        """The row of some samples."""
        return cls(name, sorted(samples)[len(samples) // 2], min(samples), max(samples), **more)

    @classmethod
    def failed(cls, name: str, error: Exception) -> "BenchRow":
        """The row of what raised an error."""
        return cls(name, error=" ".join(f"{type(error).__name__}: {error}".split())[:300])


Timed = tuple[Contender, Sequence[Any]]
"""A contender and its operands."""


def ready(title: str, made: Mapping[str, Callable[[], Timed]]) -> tuple[dict[str, Timed], list[BenchRow]]:
    """The contenders that could be made and called once, and a row that says why for each of the others."""
    contenders: dict[str, Timed] = {}
    failed = []
    for name, make in made.items():
        try:
            contender, args = make()
            jax.block_until_ready(contender.call(contender.start(args)))
            contenders[name] = contender, args
        except Exception as error:  # whatever goes wrong is the row
            failed.append(BenchRow.failed(f"{title}, {name}", error))
    return contenders, failed


class Clock:
    """Time that is left, and lines of progress."""

    def __init__(self, budget: float, say: Callable[[str], None]):
        """budget: seconds from now on."""
        self.begun, self.budget, self.say = time.monotonic(), budget, say

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def rows(self, name: str, make: Callable[[], list[BenchRow]]) -> Iterator[BenchRow]:
        """The rows that make() gives; one that says why where it fails or time is up."""
        self.say(f"[{self.elapsed:4.0f} s] {name}")
        if self.elapsed > self.budget:
            yield BenchRow(name, error=f"left out: the {self.budget:.0f} s are up")
            return
        try:
            yield from make()
        except Exception as error:  # whatever goes wrong is the row
            yield BenchRow.failed(name, error)


def shown(rows: list[BenchRow]) -> str:
    """The rows as a table: microseconds, gigabytes or 10^12 operations per second."""
    lines = []
    for row in rows:
        if row.seconds is None:
            lines.append((row.name, "", "", "", "", "", row.error[:90] or row.check))
            continue
        reached = "" if row.reached is None else f"{row.reached / 1e12:.2f} T/s"
        share = "" if row.share is None else f"{row.share:.0%}"
        plain = "" if row.plain is None else f"{row.plain / row.seconds:.2f} x"
        spread = f"{row.low * 1e6:,.0f} to {row.high * 1e6:,.0f}" if row.low is not None and row.high is not None else ""
        lines.append((row.name, f"{row.seconds * 1e6:,.1f}", spread, reached, share, plain, row.error[:90] or row.check))
    heads = ("", "microseconds", "spread", "reached", "of ceiling", "faster than XLA", "check")
    return table(heads, lines)

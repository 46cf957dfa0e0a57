"""Which module becomes what: rules by path, and the report of what they did."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from coat_jax.ops import Recipe

KEEP = "keep"
"""The rule of a module that stays as it is, with all that is in it."""


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """The rule of a module that computes down(silu(gate(x)) * up(x)): as a whole, which keeps the least.

    Attributes:
      gate, up, down: names of its three layers without bias.
      recipe: what is quantized and kept; None is the one that `convert` is given.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    recipe: Recipe | None = None


Rule = Recipe | SwiGLU | str
Rules = Mapping[str, Rule]


@dataclasses.dataclass(frozen=True)
class Swap:
    """What became of one module.

    Attributes:
      path: where it is, names with slashes between.
      was: its class.
      became: what it computes as now; None where it was left.
      why: why it was left; "" where it was not.
    """

    path: str
    was: str
    became: str | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion did. Printed, it is a table.

    Attributes:
      swaps: one entry for each module that was swapped or left, in the order in which they run or were made.
      kept_before, kept_after: bytes that differentiation keeps between the passes beside the parameters, of the inputs that
        `convert` was given; None where it was given none. Nothing is compiled for it: what XLA drops or computes again
        is counted.
    """

    swaps: tuple[Swap, ...]
    kept_before: int | None = None
    kept_after: int | None = None

    @property
    def swapped(self) -> tuple[str, ...]:
        """Paths of the modules that were swapped."""
        return tuple(swap.path for swap in self.swaps if swap.became is not None)

    def __repr__(self) -> str:
        rows = [("module", "was", "is")] + [(s.path, s.was, s.became or f"left: {s.why}") for s in self.swaps]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.kept_before and self.kept_after is not None:
            before, after = self.kept_before / 2**20, self.kept_after / 2**20
            lines.append(f"kept for the backward pass: {before:.2f} MiB before, {after:.2f} MiB after ({after / before:.2f})")
        return "\n".join(lines)


def checked(rules: Rules | None, recipe: Recipe) -> Rules:
    """The rules, with one behind them that gives every other module `recipe`.

    Raises:
      TypeError: a rule that is none.
    """
    rules = {} if rules is None else rules
    if not isinstance(rules, Mapping):
        raise TypeError(f"convert: rules={rules!r}; use a dictionary of path patterns, such as {{'*head': 'keep'}}")
    for pattern, rule in rules.items():
        if not (rule == KEEP or isinstance(rule, (Recipe, SwiGLU))):
            raise TypeError(f"convert: rules[{pattern!r}]={rule!r}; use 'keep', a Recipe, or SwiGLU(...)")
    return {**rules, "*": recipe} if "*" not in rules else rules


def rule_of(path: str, rules: Rules) -> Rule:
    """The rule of the first pattern that fits a path, or a module that it is in."""
    parts = path.split("/")
    whole = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern, rule in rules.items():
        inside = whole if rule == KEEP else [path]
        if any(fnmatch.fnmatchcase(name, pattern) for name in inside):
            return rule
    return KEEP


def unused(rules: Rules | None, paths: Any) -> list[str]:
    """Patterns that fit no module, which are misspelt."""
    return [pattern for pattern in rules or () if not any(fnmatch.fnmatchcase(path, pattern) for path in paths)]

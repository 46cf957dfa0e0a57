"""Tables as plain text, for programs that run with nothing but JAX installed."""

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line per row under the heads: the first column to the left, the others to the right.

    Example:
      >>> print(table(["kernel", "bytes"], [["quantize", "3"]]))
      kernel    bytes
      --------  -----
      quantize      3
    """
    lines = [list(heads), [], *map(list, rows)]
    widths = [max(len(line[i]) for line in lines if line) for i in range(len(heads))]
    lines[1] = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )

"""`python -m coat_jax.bench`, with nothing but the standard library to read its arguments."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from coat_jax.bench import run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; 2 for bad input, 1 for a kernel whose results are wrong."""
    parser = argparse.ArgumentParser(prog="python -m coat_jax.bench", description=run.__doc__)
    parser.add_argument("--only", default="", help="kernels whose names hold this")
    parser.add_argument("--json", metavar="FILE", help="write the rows to a file")
    parser.add_argument("--calibrate", metavar="FILE", help="write the device's description for coat-jax plan --device")
    parser.add_argument("--budget", type=float, default=run.BUDGET, help="seconds after which no row is begun")
    options = parser.parse_args(argv)
    typed = shlex.join(["python", "-m", "coat_jax.bench", *(sys.argv[1:] if argv is None else argv)])
    try:
        run.run(options.only, run.BenchOutput(options.json, options.calibrate, typed), options.budget)
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        print("bench: " + " ".join(str(error).split()).removeprefix("bench: "), file=sys.stderr)
        return 1 if isinstance(error, ArithmeticError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

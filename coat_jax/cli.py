"""The command `coat-jax`: what surrounds its commands, which stand in `coat_jax.commands`.

Whatever is typed ends in one line on standard error and a status: 0 done, 1 done and something is wrong with what was looked
at, 2 refused, 130 interrupted.
"""

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from coat_jax.interrupts import deferred, heeded

EXTRAS = {"typer": "demo", "rich": "demo", "grain": "demo", "matplotlib": "demo", "flatbuffers": "plan"}
"""Packages that commands import, and the extra that installs each."""
OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG)
"""How writing to standard output fails: nobody reads it any more, its device is full, it is closed."""
REFUSED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `coat-jax` and returns its status: bad input is one line on stderr and 2, a loss that is not finite one and 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _occupy_descriptors()
        if not Path("/proc/driver/nvidia").exists():
            # Without a driver, JAX's CUDA plug-in (of the `plan` extra) logs tracebacks about libraries that only a GPU needs.
            os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        with heeded() as check:
            if not {"--help", "--version"} & set(arguments):
                with deferred():
                    importlib.import_module("jax")
            status = _run(arguments)
            check()
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        line, status = _explained(error)
        if line is None or "--traceback" in arguments:
            raise
        with contextlib.suppress(OSError):
            if sys.stderr is not None:
                print("coat-jax: " + " ".join(line.split()), file=sys.stderr)
    if argv is None:  # what is left is Python's own end, in which an interrupt is no news
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return status


def _run(arguments: list[str]) -> int:
    from coat_jax import commands

    try:
        return commands.app(args=arguments, standalone_mode=False, prog_name="coat-jax") or 0
    except SystemExit as left:
        # So rich and typer leave where nobody reads standard output any more.
        if isinstance(left.__context__, OSError):
            raise left.__context__ from None
        raise


def _explained(error: Exception) -> tuple[str | None, int]:
    """One line about an error, and the status; no line for what nobody foresaw, which shows its traceback."""
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").split(".")[0])):
        return f"this command needs {error.name}; install it with: pip install '.[{extra}]' or 'coat-jax[{extra}]'", REFUSED
    if type(error).__name__ == "Abort":  # older typers raise this for an interrupt, newer ones return 130
        return "interrupted", INTERRUPTED
    if hasattr(error, "format_message"):  # of typer: an unknown option or command, a value of the wrong type
        return error.format_message(), REFUSED
    # Errors about files name them; what is left is standard output.
    if isinstance(error, OSError) and error.filename is None and error.errno in OF_OUTPUT:
        _abandon_output()
        return f"standard output cannot be written: {error.strerror}", REFUSED
    if isinstance(error, ArithmeticError):
        return str(error), 1
    return (str(error), REFUSED) if isinstance(error, ValueError | OSError) else (None, REFUSED)


def _occupy_descriptors() -> None:
    """Leads standard descriptors that are closed (as by `>&-`) to nowhere.

    Otherwise the next file that is opened gets their number, and with it whatever a library prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _abandon_output() -> None:
    """Leads standard output to nowhere: Python would write to it once more at its end, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())

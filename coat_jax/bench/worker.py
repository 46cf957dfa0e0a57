"""A process of its own for the rows of a bench: what breaks it breaks one row, and the next ones get a new one.

After some errors of a GPU every later call in the same process fails, and some abort the process.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

PATIENCE = 180.0
"""Seconds after which a call counts as hung."""


class CallError(RuntimeError):
    """What a call in a worker raised, or how its process ended."""


class Worker:
    """Calls functions in another Python process, which is replaced after a call that failed.

    Functions and arguments travel as pickles, so functions are those of modules. Close it, or use it as a context.

    Example:
      >>> with Worker() as worker:
      ...     worker.call(divmod, 7, 2)
      (3, 1)
    """

    def __init__(self, patience: float = PATIENCE):
        """patience: seconds for one call."""
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), there.

        Raises:
          CallError: it raised an error, ended its process, or took longer than the patience.
        """
        process = self._process = self._process or _started()
        timer = threading.Timer(self._patience, process.kill)
        timer.start()
        try:
            pickle.dump((function, args), process.stdin)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            result, error = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError):
            hung = not timer.is_alive()
            status = self.close()
            raise CallError(f"hung for {self._patience:.0f} s" if hung else f"its process ended with status {status}") from None
        finally:
            timer.cancel()
        if error:
            self.close()
            raise CallError(error)
        return result

    def close(self) -> int | None:
        """Ends the process, if there is one, and gives its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            return process.wait(5)  # one that waits for a call ends here
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stdout.close()  # type: ignore[union-attr]


def _started() -> subprocess.Popen[bytes]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # the parent's, which leaves the memory to this process
    return subprocess.Popen([sys.executable, "-m", __name__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def serve(calls: BinaryIO, results: BinaryIO) -> None:
    """The other process's side: calls what comes until nothing comes any more."""
    while True:
        try:
            function, args = pickle.load(calls)
        except EOFError:
            return
        try:
            answer = pickle.dumps((function(*args), ""))
        except Exception as error:  # whatever goes wrong is the answer
            answer = pickle.dumps((None, " ".join(f"{type(error).__name__}: {error}".split())[:300]))
        results.write(answer)
        results.flush()


if __name__ == "__main__":
    # Answers have a descriptor of their own: libraries print to standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)

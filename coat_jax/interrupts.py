"""An interrupt (Ctrl-C) that something between swallowed: seen again where the work goes on to its next part."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class _Noted:
    """A handler of interrupts that raises KeyboardInterrupt, as Python's own, and remembers that it did."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self.came:
            raise KeyboardInterrupt


@contextlib.contextmanager
def heeded() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if there was an interrupt within this context, or one around it.

    Work that takes any error for a result ("this kernel does not compile") would take an interrupt for one too: Python raises
    it in whatever runs, and where that is a callback of a compiler, it comes out as an error of the compiler. Such work calls
    the function after each of its parts.

    Example:
      >>> with heeded() as check:
      ...     for part in ("a", "b"):
      ...         check()  # goes on, as nobody pressed Ctrl-C
    """
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, _Noted):
        yield before.check
        return
    noted = _Noted()
    # Only the main thread may set a handler, and one that somebody else set (to ignore interrupts, say) stays.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield noted.check
        return
    signal.signal(signal.SIGINT, noted)
    try:
        yield noted.check
    finally:
        signal.signal(signal.SIGINT, before)


def heed() -> None:
    """Raises KeyboardInterrupt if there was an interrupt within a context of `heeded` around this; else does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Noted):
        handler.check()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """An interrupt within this context comes at its end: for imports of compiled modules, which do not survive one.

    Threads that begin meanwhile leave interrupts to the main thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

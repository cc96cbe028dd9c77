"""Ctrl-C and SIGTERM: heard at once while a command gets ready, between two steps while it makes results.

Python turns a signal into an exception at whatever line runs. That is right for a command that waits, wrong for one
that writes results (the ones of the running step would be lost), and it fails inside callbacks of the garbage
collector, where exceptions are printed and forgotten: the run would go on as if nothing had been pressed.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

# JAX collects its own garbage there; an exception in it is ignored.
_DEAF = ("_xla_gc_callback",)
_AGAIN_S = 0.02


class Interrupts:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt; in a :meth:`deferred` block they set ``requested``.

    The second signal raises in any case. Signals that were ignored before stay ignored (``nohup``), and outside of
    the main thread nothing is changed. A context manager; may be nested.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                # None: a handler that is not Python's, which could not be put back.
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The first signal only sets ``requested``, for a loop that looks at it between its steps."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name in _DEAF:
            timer = threading.Timer(_AGAIN_S, signal.raise_signal, (number,))
            timer.daemon = True
            timer.start()
            return
        again, self.requested = self.requested, True
        if again or not self._deferred:
            raise KeyboardInterrupt

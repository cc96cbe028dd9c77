"""Ctrl-C between two steps of the engine, never within one.

Python raises KeyboardInterrupt at whatever line runs. Within a step that may be between a commit, which deletes the
arena that it was given, and the line that keeps the new one: the engine would be lost, in a notebook with all that it
holds.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unbroken() -> Iterator[list[int]]:
    """Hold the first Ctrl-C back until the block has ended: the caller then finds it in what it got, and raises.

    A second one is raised at once. Where Ctrl-C does something else than raise (a command's own handler), and outside
    of the main thread, nothing is changed.
    """
    heard: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield heard
        return

    def hear(number: int, frame: Any) -> None:
        if heard:
            signal.default_int_handler(number, frame)
        heard.append(number)

    signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

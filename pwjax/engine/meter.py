"""What a run cost, measured: device bytes, compilations, tokens and seconds. Never computed from the plan."""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compilations = 0
_listening = False


def compilations() -> int:
    """Compilations in this process since the first call, cache hits included."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_count)
        _listening = True
    return _compilations


def _count(event: str, duration_secs: float, **_kwargs: str | int) -> None:
    global _compilations
    _compilations += event == _COMPILE_EVENT


@dataclass
class Rate:
    """Tokens and the seconds they took."""

    tokens: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time that the body takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @property
    def per_second(self) -> float:
        """Tokens per second, 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Meter:
    """Peak of live device buffers plus what the running program adds to them.

    Arrays that were alive when the meter was made belong to somebody else and are left out. On a GPU the
    allocator's own peak counts as well.
    """

    peak_bytes: int = 0
    prefill: Rate = field(default_factory=Rate)
    decode: Rate = field(default_factory=Rate)
    _foreign: dict[int, weakref.ref] = field(default_factory=dict)
    _start: int = 0

    def __post_init__(self):
        self._foreign = {id(a): weakref.ref(a) for a in jax.live_arrays()}

    def warm(self) -> None:
        """Compilations from now on count as recompilations."""
        self._start = compilations()

    @property
    def recompiles(self) -> int:
        """Compilations since :meth:`warm`."""
        return compilations() - self._start

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compilations of the body were asked for and are no recompilations."""
        before = compilations()
        yield
        self._start += compilations() - before

    def observe(self, program_bytes: int = 0) -> None:
        """Take a reading, with the temporaries and outputs of the program about to run."""
        live = 0
        for array in jax.live_arrays():
            reference = self._foreign.get(id(array))
            if reference is None or reference() is not array:
                live += array.nbytes
        self.peak_bytes = max(self.peak_bytes, live + program_bytes)

    def device_peak(self) -> int | None:
        """The allocator's peak in bytes, where the device reports one."""
        stats = jax.devices()[0].memory_stats()
        return stats.get("peak_bytes_in_use") if stats else None

"""Copies of pages from the host to the device, away from the engine thread.

A worker reads a job's pages (the store checks each checksum), lays them out in buffers of the commit widths, and
waits until the device has its own copy. A thread does it because ``jax.device_put`` blocks on recent versions; every
buffer is new and never written again because ``device_put`` may alias an aligned NumPy array for ever. Only the
engine thread touches the arena: a transfer hands words over and knows nothing of page ids.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pwjax.memory.arena import COMMIT_WIDTHS, split_widths


class TransferError(RuntimeError):
    """A copy came back failed, cut short, late or cancelled."""


@dataclass(frozen=True)
class TransferJob:
    """Host ``pages`` of ``layer`` to stage for ``block``, in this order, padded to the commit ``widths``."""

    block: int
    layer: int
    pages: tuple[int, ...]
    widths: tuple[int, ...] = COMMIT_WIDTHS

    @property
    def chunks(self) -> tuple[int, ...]:
        """Rows of each staged array."""
        return split_widths(len(self.pages), self.widths)


@dataclass(frozen=True)
class StagedPages:
    """Device words of a job: ``words`` uint32[width, page_words] a chunk, the first ``pages`` rows in all are real.

    ``taken_s``: processor seconds that the copy took from steps that ran beside it; 0 where another device computes
    them, and for copies that ran inside of a boundary, which pays for its time.
    """

    words: tuple[jax.Array, ...]
    pages: int
    taken_s: float = 0.0


class PageStore(Protocol):
    """Where pages come from; ``read`` raises where a checksum or a length is wrong."""

    def read(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """uint32[n, page_words] of ``pages`` (counted from the start of the layer's file)."""
        ...


class TransferHandle(Protocol):
    """A copy on its way."""

    def done(self) -> bool:
        """Whether it has ended, well or badly; from then on it holds no buffer but its result."""
        ...

    def result(self) -> StagedPages:
        """Wait for it; raises what went wrong."""
        ...

    def cancel(self) -> None:
        """Stop it where that is still possible; its result is not wanted any more."""
        ...


class Transfer(Protocol):
    """Whatever can stage pages; tests inject others than the threads."""

    def submit(self, job: TransferJob) -> TransferHandle:
        """Start a copy; does not wait and does not raise for what the copy will meet."""
        ...

    def close(self) -> None:
        """Wait for running copies and release the workers."""
        ...


def pinned_host(device: jax.Device) -> SingleDeviceSharding | None:
    """Page-locked host memory of a device that copies from it without stopping the host; None on a CPU."""
    if device.platform == "cpu":
        return None
    kinds = {memory.kind for memory in device.addressable_memories()}
    return SingleDeviceSharding(device, memory_kind="pinned_host") if "pinned_host" in kinds else None


def stage(store: PageStore, job: TransferJob, pinned: SingleDeviceSharding | None = None) -> StagedPages:
    """Read a job and copy it to the device, by way of ``pinned`` memory where there is any.

    Returns when the device has it. Raises what the store raises.
    """
    rows = store.read(job.layer, list(job.pages))
    if rows.dtype != np.uint32 or rows.ndim != 2 or len(rows) != len(job.pages):
        raise TransferError(f"asked for {len(job.pages)} pages, the store gave {rows.dtype} {rows.shape}")
    words, start = [], 0
    for width in job.chunks:
        buffer = np.zeros((width, rows.shape[1]), np.uint32)
        part = rows[start : start + width]
        buffer[: len(part)] = part
        if pinned is None:
            words.append(jax.device_put(buffer))
        else:
            device = SingleDeviceSharding(next(iter(pinned.device_set)))
            words.append(jax.device_put(jax.device_put(buffer, pinned), device))
        start += width
    return StagedPages(tuple(jax.block_until_ready(words)), len(rows))


class _Ended:
    """Handle of a copy that ran inside of ``submit``."""

    def __init__(self, store: PageStore, job: TransferJob):
        self._staged, self._error = None, None
        try:
            self._staged = stage(store, job)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> StagedPages:
        if self._staged is None:
            raise self._error or TransferError("the copy was cancelled")
        return self._staged

    def cancel(self) -> None:
        self._staged = None


class SyncTransfer:
    """Copies inside of ``submit``: deterministic, and what the asynchronous form must equal."""

    def __init__(self, store: PageStore):
        self._store = store

    def submit(self, job: TransferJob) -> TransferHandle:
        """Run the copy now."""
        return _Ended(self._store, job)

    def close(self) -> None:
        """Nothing to release."""


class _Pending:
    """Handle of a copy in the thread pool."""

    def __init__(self, future: Future):
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> StagedPages:
        try:
            return self._future.result()
        except CancelledError as error:
            raise TransferError("the copy was cancelled") from error

    def cancel(self) -> None:
        self._future.cancel()


def _yield_to_steps() -> None:
    """Let this thread take a processor only when one is free, or in its turn: never from a kernel as it wakes up.

    A lower priority would be worse: a thread that holds the interpreter's lock and is not run holds the engine up.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox may forbid it; copies are only less considerate then
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


class ThreadTransfer:
    """Copies in ``workers`` threads. The pager bounds and counts what is in flight."""

    def __init__(self, store: PageStore, workers: int = 2):
        self._store = store
        self._pinned = pinned_host(jax.devices()[0])
        self._on_cpu = jax.devices()[0].platform == "cpu"
        polite = _yield_to_steps if self._on_cpu else None
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="pwjax-transfer", initializer=polite)

    def submit(self, job: TransferJob) -> TransferHandle:
        """Queue a copy for the next free worker."""
        return _Pending(self._pool.submit(self._copy, job))

    def _copy(self, job: TransferJob) -> StagedPages:
        began_s = time.thread_time()
        staged = stage(self._store, job, self._pinned)
        return replace(staged, taken_s=time.thread_time() - began_s) if self._on_cpu else staged

    def close(self) -> None:
        """Drop queued copies, wait for running ones and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

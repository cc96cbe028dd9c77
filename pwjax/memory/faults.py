"""A page store and a transfer that misbehave on purpose, for tests of the pager and of anything built on it."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pwjax.memory.transfer import PageStore, StagedPages, TransferError, TransferHandle, TransferJob, stage


class FakeStore:
    """Pages that say where they come from: word 0 is the layer, word 1 the page, the rest follow from both."""

    def __init__(self, page_words: int):
        self.page_words = page_words

    def read(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """uint32[n, page_words], the same for the same arguments."""
        page = np.asarray(pages, np.uint32)[:, None]
        words = (page * np.uint32(2654435761)) ^ np.arange(self.page_words, dtype=np.uint32) ^ np.uint32(layer << 16)
        words[:, 0], words[:, 1] = layer, page[:, 0]
        return words


@dataclass(frozen=True)
class Fate:
    """What becomes of a copy: ``polls`` answers of "not done" first (None: never done), then its ``kind``.

    ``kind`` is ``ok``, ``fail`` (raises), ``short`` (one page too few) or ``narrow`` (a chunk missing).
    """

    kind: str = "ok"
    polls: int | None = 0


class _FaultyHandle:
    def __init__(self, store: PageStore, job: TransferJob, fate: Fate):
        self._store, self._job, self._fate = store, job, fate
        self._polls = fate.polls

    def done(self) -> bool:
        if self._polls is None or self._polls > 0:
            self._polls = self._polls and self._polls - 1
            return False
        return True

    def result(self) -> StagedPages:
        self._polls = 0  # whoever waited for a copy finds it ended
        if self._fate.kind == "fail":
            raise TransferError("made to fail")
        staged = stage(self._store, self._job)
        if self._fate.kind == "short":
            return StagedPages(staged.words, staged.pages - 1)
        if self._fate.kind == "narrow":
            return StagedPages(staged.words[:-1], staged.pages)
        return staged

    def cancel(self) -> None:
        """A running copy cannot be stopped: it drains as its fate says."""


class FaultyTransfer:
    """Asks ``fate(job)`` what becomes of each copy; different ``polls`` reorder copies. ``jobs`` lists all of them."""

    def __init__(self, store: PageStore, fate: Callable[[TransferJob], Fate]):
        self._store, self._fate = store, fate
        self.jobs: list[TransferJob] = []

    def submit(self, job: TransferJob) -> TransferHandle:
        """Start a copy with the fate it is given."""
        self.jobs.append(job)
        return _FaultyHandle(self._store, job, self._fate(job))

    def close(self) -> None:
        """Nothing to release."""


class FaultyStore:
    """A page store some of whose reads raise, come short or come late, ``rate`` of them in all, drawn from ``seed``.

    For real transfers over a real store: faults happen in the worker threads. ``faults`` counts them by kind.
    """

    KINDS = ("fail", "short", "late")

    def __init__(self, store: PageStore, rate: float, seed: int, late_s: float = 0.05):
        self._store, self._rate, self._late_s = store, rate, late_s
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.faults = dict.fromkeys(self.KINDS, 0)
        self.armed = False

    def read(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """What the store reads, unless a fault was drawn; none before ``armed`` is set."""
        kind = None
        with self._lock:
            if self.armed and self._random.random() < self._rate:
                kind = self._random.choice(self.KINDS)
                self.faults[kind] += 1
        if kind == "fail":
            raise OSError("made to fail")
        if kind == "late":
            time.sleep(self._late_s)
        rows = self._store.read(layer, pages)
        return rows[:-1] if kind == "short" else rows

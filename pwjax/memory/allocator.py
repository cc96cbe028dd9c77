"""Who owns each page of the arena: bookkeeping on the host, no device."""

from collections.abc import Hashable, Sequence

import numpy as np

_FREE, _NULL = 0, -1  # markers in PageAllocator._holder; owners count from 1


class PageError(RuntimeError):
    """A page was freed twice, by a stranger, or used while not owned: a bug in the caller, never a user's fault."""


class PageAllocator:
    """Host bookkeeping of page ids ``1..num_pages-1``; page 0 is the null page and never given out.

    Every page has one owner (any hashable, such as ``("block", 7)``) or is free. Raises :class:`PageError` for a
    double free, a foreign free, or ids outside of the arena; ValueError for sizes that make no sense.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"an arena needs the null page and at least one more, got {num_pages} pages")
        self.num_pages = num_pages
        # A stack with the lowest id on top: ids depend on the sequence of calls alone, so a replay repeats them.
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._top = num_pages - 1
        self._holder = np.full(num_pages, _FREE, np.int32)
        self._holder[0] = _NULL
        self._numbers: dict[Hashable, int] = {}
        self._owners: list[Hashable] = [None]
        self._counts = [0]
        self.peak_pages = 0

    @property
    def capacity_pages(self) -> int:
        """Pages that can be owned: all but the null page."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages nobody owns."""
        return self._top

    @property
    def used_pages(self) -> int:
        """Pages somebody owns."""
        return self.capacity_pages - self._top

    def alloc(self, n: int, owner: Hashable) -> np.ndarray | None:
        """Give ``n`` free pages to ``owner``: int32[n] ids, or None (and no change) where they are not free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self._top:
            return None
        ids = self._stack[self._top - n : self._top][::-1].copy()
        self._top -= n
        self._assign(ids, owner)
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return ids

    def free(self, ids: np.ndarray | Sequence[int], owner: Hashable) -> None:
        """Return pages that ``owner`` holds; all of them or, when one is not its own, none."""
        ids = self._owned_ids(ids, owner)
        if not len(ids):
            return
        self._holder[ids] = _FREE
        self._counts[self._numbers[owner]] -= len(ids)
        self._stack[self._top : self._top + len(ids)] = ids[::-1]
        self._top += len(ids)

    def reassign(self, ids: np.ndarray | Sequence[int], owner: Hashable, new_owner: Hashable) -> None:
        """Hand pages over from ``owner`` to ``new_owner``; all or none."""
        ids = self._owned_ids(ids, owner)
        if not len(ids):
            return
        self._counts[self._numbers[owner]] -= len(ids)
        self._assign(ids, new_owner)

    def pages_of(self, owner: Hashable) -> int:
        """How many pages ``owner`` holds."""
        return self._counts[self._numbers[owner]] if owner in self._numbers else 0

    def owned(self, owner: Hashable) -> np.ndarray:
        """Ascending int32 ids that ``owner`` holds."""
        return np.flatnonzero(self._holder == self._numbers.get(owner, -2)).astype(np.int32)

    def owner_of(self, page: int) -> Hashable:
        """Owner of a page, None for a free page or the null page."""
        return self._owners[max(0, self._holder[page])]

    def owns(self, ids: np.ndarray | Sequence[int], owner: Hashable) -> bool:
        """Whether every page of ``ids`` belongs to ``owner``."""
        return bool(np.all(self._holder[np.asarray(ids, np.int64)] == self._numbers.get(owner, -2)))

    def counts(self) -> dict[Hashable, int]:
        """Pages per owner, for owners that hold any."""
        return {owner: n for owner, n in zip(self._owners, self._counts, strict=True) if n}

    def check_invariants(self) -> None:
        """Raise :class:`PageError` where a page is lost, listed twice, or counted wrongly."""
        free = self._stack[: self._top]
        if len(np.unique(free)) != len(free) or np.any(self._holder[free] != _FREE):
            raise PageError("the free list names a page twice or a page that is owned")
        if self._holder[0] != _NULL or np.count_nonzero(self._holder == _FREE) != len(free):
            raise PageError("a page is neither free nor owned")
        held = np.bincount(self._holder[self._holder > 0], minlength=len(self._counts))
        if self._counts != held.tolist():
            raise PageError("page counts of the owners do not match the pages they hold")

    def _assign(self, ids: np.ndarray, owner: Hashable) -> None:
        number = self._numbers.get(owner)
        if number is None:
            number = self._numbers[owner] = len(self._owners)
            self._owners.append(owner)
            self._counts.append(0)
        self._holder[ids] = number
        self._counts[number] += len(ids)

    def _owned_ids(self, ids: np.ndarray | Sequence[int], owner: Hashable) -> np.ndarray:
        ids = np.asarray(ids, np.int32).reshape(-1)
        if len(ids) and (ids.min() < 1 or ids.max() >= self.num_pages):
            raise PageError(f"page ids lie in 1..{self.num_pages - 1}, got {ids.min()}..{ids.max()}")
        if len(np.unique(ids)) != len(ids):
            raise PageError(f"{owner} names a page twice in one call")
        if len(ids) and not self.owns(ids, owner):
            page = next(int(i) for i in ids if not self.owns([i], owner))
            raise PageError(f"page {page} belongs to {self.owner_of(page) or 'nobody'}, not to {owner}")
        return ids

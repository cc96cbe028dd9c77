"""One device array of equal pages, who owns each page, and the two small programs that write them.

The compiled steps only read the arena. ``commit_pages`` and ``commit_kv`` are its only writers, tiny programs with
the arena donated, so a commit costs the bytes it writes and never a copy of the arena. Both are compiled ahead of
time for fixed sizes: a program that reads and writes the pool in one go would copy all of it on the CPU.

Never take a NumPy view of the arena (``np.asarray(arena.array)``): while it lives, donation silently turns into a
full copy. :meth:`Arena.read_pages` copies a few pages out instead.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.pages import WORD_BYTES, ceil_div

# Pages one commit writes. The small width keeps the padding of a single LUT cheap; every width is a program.
COMMIT_WIDTHS = (8, 64)

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


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one compiled program: arguments (the arena among them), outputs, those that alias, temporaries."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def extra_bytes(self) -> int:
        """Bytes it needs beside the arrays it updates in place: other arguments, temporaries, fresh outputs."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - 2 * self.alias_bytes


def program_memory(compiled: jax.stages.Compiled) -> ProgramMemory:
    """Sizes that XLA reports for a compiled program (never its peak figure, which omits temporaries on the CPU)."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError("this backend does not report the memory of compiled programs, so no budget can be kept")
    return ProgramMemory(
        stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.alias_size_in_bytes, stats.temp_size_in_bytes
    )


# One row of words at (page, word): a window on the last axis stays in place and is copied as one run.
_KV_SCATTER = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)


def _commit_pages(arena: jax.Array, ids: jax.Array, words: jax.Array) -> jax.Array:
    return arena.at[ids].set(words, mode="drop", unique_indices=True)


def _commit_kv(arena: jax.Array, page: jax.Array, word: jax.Array, rows: jax.Array) -> jax.Array:
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(arena, jnp.stack([page, word], -1), rows, _KV_SCATTER, unique_indices=True, mode=mode)


@lru_cache(maxsize=128)
def compile_commit_pages(num_pages: int, page_words: int, width: int) -> jax.stages.Compiled:
    """Program ``(arena, ids int32[width], words uint32[width, page_words]) -> arena``, the arena donated."""
    spec = jax.ShapeDtypeStruct
    arena, words = spec((num_pages, page_words), jnp.uint32), spec((width, page_words), jnp.uint32)
    return jax.jit(_commit_pages, donate_argnums=0).lower(arena, spec((width,), jnp.int32), words).compile()


@lru_cache(maxsize=128)
def compile_commit_kv(num_pages: int, page_words: int, rows: int, row_words: int) -> jax.stages.Compiled:
    """Program ``(arena, page int32[rows], word int32[rows], uint32[rows, row_words]) -> arena``, the arena donated."""
    spec = jax.ShapeDtypeStruct
    arena, index = spec((num_pages, page_words), jnp.uint32), spec((rows,), jnp.int32)
    update = spec((rows, row_words), jnp.uint32)
    return jax.jit(_commit_kv, donate_argnums=0).lower(arena, index, index, update).compile()


def commit_programs(
    num_pages: int,
    page_words: int,
    page_widths: Sequence[int] = COMMIT_WIDTHS,
    kv_shapes: Sequence[tuple[int, int]] = (),
) -> dict[tuple, jax.stages.Compiled]:
    """Every commit program an arena needs, compiled; nothing of the arena's size is allocated.

    ``kv_shapes`` are ``(rows, row_words)``. Keys are ``("commit_pages", width)`` and
    ``("commit_kv", rows, row_words)``. The budget reads the sizes with :func:`program_memory`; all but the arena's
    own do not depend on ``num_pages``, so a small arena will do.
    """
    programs: dict[tuple, jax.stages.Compiled] = {
        ("commit_pages", width): compile_commit_pages(num_pages, page_words, width) for width in page_widths
    }
    for rows, row_words in kv_shapes:
        programs["commit_kv", rows, row_words] = compile_commit_kv(num_pages, page_words, rows, row_words)
    return programs


def padded_pages(pages: int, widths: Sequence[int] = COMMIT_WIDTHS) -> int:
    """Pages of words that committing ``pages`` takes, padding included."""
    return ceil_div(pages, widths[0]) * widths[0]


def split_widths(pages: int, widths: Sequence[int] = COMMIT_WIDTHS) -> tuple[int, ...]:
    """Commit widths that cover ``pages`` with the least padding, then with the fewest calls."""
    left, out = padded_pages(pages, widths), []
    for width in sorted(widths, reverse=True):
        out += [width] * (left // width)
        left %= width
    return tuple(out)


class Arena:
    """Owner of the one device array ``uint32[num_pages, page_words]``, zeros at first; page 0 stays zero.

    ``page_widths`` ascend and are multiples of the first; ``kv_shapes`` are the ``(rows, row_words)`` to compile
    ahead (others compile at first use and show up in :attr:`programs`). Only the engine thread may call it.
    """

    def __init__(
        self,
        num_pages: int,
        page_words: int,
        page_widths: Sequence[int] = COMMIT_WIDTHS,
        kv_shapes: Sequence[tuple[int, int]] = (),
    ):
        self.page_widths = tuple(page_widths)
        if list(page_widths) != sorted(set(page_widths)) or any(w % page_widths[0] for w in page_widths):
            raise ValueError(f"commit widths must ascend and be multiples of the first, got {self.page_widths}")
        self.num_pages = num_pages
        self.page_words = page_words
        self.programs = commit_programs(num_pages, page_words, self.page_widths, kv_shapes)
        # Zeros come from a program: a host array of that size would double the memory for a moment.
        self._array = jax.jit(lambda: jnp.zeros((num_pages, page_words), jnp.uint32))()

    @property
    def array(self) -> jax.Array:
        """The device array. A commit deletes it: fetch it anew for every dispatch and never view it in NumPy."""
        return self._array

    @property
    def nbytes(self) -> int:
        """Bytes of the device array."""
        return self.num_pages * self.page_words * WORD_BYTES

    def commit_pages(self, ids: np.ndarray | Sequence[int], words: jax.Array) -> None:
        """Overwrite pages ``ids`` int[n] with the first n of ``words`` uint32[width, page_words], in place.

        ``width`` is one of :attr:`page_widths` and at least n; the rows past n are dropped. ValueError otherwise.
        """
        ids = np.asarray(ids, np.int32).reshape(-1)
        width = words.shape[0]
        if width not in self.page_widths or words.shape[1:] != (self.page_words,) or len(ids) > width:
            raise ValueError(f"{len(ids)} pages cannot take words {words.shape}; widths are {self.page_widths}")
        if len(ids) and (ids.min() < 1 or ids.max() >= self.num_pages or len(np.unique(ids)) != len(ids)):
            raise ValueError(f"pages to write must be distinct and in 1..{self.num_pages - 1}, got {ids.tolist()}")
        # Padding is distinct and past the end; -1 would wrap around and overwrite the last page.
        padded = np.arange(self.num_pages, self.num_pages + width, dtype=np.int32)
        padded[: len(ids)] = ids
        self._array = self.programs["commit_pages", width](self._array, padded, words)

    def commit_kv(self, page: np.ndarray, word: np.ndarray, rows: jax.Array) -> None:
        """Write ``rows`` uint32[M, row_words] at ``[page[m], word[m]:]``, in place.

        ``page`` and ``word`` are int[M] on the host; rows whose page is ``num_pages`` or more are dropped. The places
        must be distinct. ValueError for the null page or a row that would leave its page.
        """
        page, word = np.asarray(page, np.int32).reshape(-1), np.asarray(word, np.int32).reshape(-1)
        count, row_words = rows.shape
        if page.shape != (count,) or word.shape != (count,):
            raise ValueError(f"{count} rows need as many places, got {page.shape} pages and {word.shape} words")
        dropped = page >= self.num_pages
        if np.any(page < 1) or np.any((word < 0) | (word + row_words > self.page_words) & ~dropped):
            raise ValueError("a KV row must lie inside of a page that is not the null page")
        key = ("commit_kv", count, row_words)
        if key not in self.programs:
            self.programs[key] = compile_commit_kv(self.num_pages, self.page_words, count, row_words)
        page = np.where(dropped, np.arange(self.num_pages, self.num_pages + count, dtype=np.int32), page)
        word = np.where(dropped, 0, word)
        self._array = self.programs[key](self._array, page, word, rows)

    def read_pages(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Host copy uint32[n, page_words] of a few pages; for checks, not for the hot path."""
        return np.array(_gather(self._array, np.asarray(ids, np.int32)))

    def wait(self) -> None:
        """Block until every commit so far has run, so that the words it read are free."""
        self._array.block_until_ready()

    def delete(self) -> None:
        """Free the device memory now; the arena cannot be used afterwards."""
        self._array.delete()


@jax.jit
def _gather(arena: jax.Array, ids: jax.Array) -> jax.Array:
    return arena[ids]

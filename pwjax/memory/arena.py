"""One device array of equal pages, and the two small programs that write them.

The compiled steps only read the arena. ``commit_pages`` and ``commit_kv`` are its only writers, tiny programs with
the arena donated, so a commit costs the bytes it writes and never a copy of the arena. Both are compiled ahead of
time for fixed sizes: a program that reads and writes the pool in one go would copy all of it on the CPU.

Never take a NumPy view of the arena (``np.asarray(arena.array)``): while it lives, donation silently turns into a
full copy. :meth:`Arena.read_pages` copies a few pages out instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.pages import WORD_BYTES, ceil_div

# Pages one commit writes. The small width keeps the padding of a single LUT cheap; every width is a program.
COMMIT_WIDTHS = (8, 64)


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

    @property
    def running_bytes(self) -> int:
        """Bytes it adds to live arguments while it runs: temporaries and fresh outputs."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes


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


@jax.named_scope("commit_pages")
def commit_pages(arena: jax.Array, ids: jax.Array, words: jax.Array) -> jax.Array:
    """``arena`` with ``words`` uint32[C, page_words] in pages ``ids`` int32[C], which are distinct.

    An id of ``num_pages`` or more is dropped. Pure; in place where the caller donates the arena.
    """
    return arena.at[ids].set(words, mode="drop", unique_indices=True)


@jax.named_scope("commit_kv")
def commit_kv(arena: jax.Array, page: jax.Array, word: jax.Array, rows: jax.Array) -> jax.Array:
    """``arena`` with ``rows`` uint32[M, row_words] at ``[page[m], word[m]:]``, places distinct.

    A page of ``num_pages`` or more is dropped. Pure; in place where the caller donates the arena.
    """
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(arena, jnp.stack([page, word], -1), rows, _KV_SCATTER, unique_indices=True, mode=mode)


@jax.jit
def _gather(arena: jax.Array, ids: jax.Array) -> jax.Array:
    return arena[ids]


@lru_cache(maxsize=128)
def compile_commit_pages(num_pages: int, page_words: int, width: int) -> jax.stages.Compiled:
    """Program ``(arena, ids int32[width], words uint32[width, page_words]) -> arena``, the arena donated."""
    spec = jax.ShapeDtypeStruct
    arena, words = spec((num_pages, page_words), jnp.uint32), spec((width, page_words), jnp.uint32)
    return jax.jit(commit_pages, donate_argnums=0).lower(arena, spec((width,), jnp.int32), words).compile()


@lru_cache(maxsize=128)
def compile_commit_kv(num_pages: int, page_words: int, rows: int, row_words: int) -> jax.stages.Compiled:
    """Program ``(arena, page int32[rows], word int32[rows], uint32[rows, row_words]) -> arena``, the arena donated."""
    spec = jax.ShapeDtypeStruct
    arena, index = spec((num_pages, page_words), jnp.uint32), spec((rows,), jnp.int32)
    update = spec((rows, row_words), jnp.uint32)
    return jax.jit(commit_kv, donate_argnums=0).lower(arena, index, index, update).compile()


@lru_cache(maxsize=128)
def compile_gather_pages(num_pages: int, page_words: int, width: int) -> jax.stages.Compiled:
    """Program ``(arena, ids int32[width]) -> words uint32[width, page_words]``; padding ids read the null page."""
    spec = jax.ShapeDtypeStruct
    return _gather.lower(spec((num_pages, page_words), jnp.uint32), spec((width,), jnp.int32)).compile()


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


def free(tree: Any) -> None:
    """Delete the device arrays of ``tree``; those that are deleted or were donated already stay so."""
    for array in jax.tree.leaves(tree):
        if not array.is_deleted():
            array.delete()


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
        self._gathers = {width: compile_gather_pages(num_pages, page_words, width) for width in self.page_widths}
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

    def copy_pages(self, source: np.ndarray, target: np.ndarray) -> None:
        """Overwrite pages ``target`` int[n], distinct, with the contents of pages ``source`` int[n].

        By way of words as large as those of a commit, so that the arena itself is never copied.
        """
        source, start = np.asarray(source, np.int32), 0
        for width in split_widths(len(source), self.page_widths):
            ids = np.zeros(width, np.int32)
            part = source[start : start + width]
            ids[: len(part)] = part
            self.commit_pages(target[start : start + width], self._gathers[width](self._array, ids))
            start += width

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

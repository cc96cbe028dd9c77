"""KV pages of the fixed slots: reservation, places of tokens, and the device tables that attention reads.

Each kind of attention has a table of its own, for its rows differ in width. K and V of a layer lie apart. A page holds
``page_tokens`` whole rows (not always a power of two)::

    table[slot, layer, 0 or 1, turn % columns] = page of tokens turn*page_tokens .. (turn+1)*page_tokens - 1

so one more turn of a slot costs ``2 * layers`` pages. Where a kind has a window, its table is a ring of just enough
columns to hold it: a turn that comes round writes over the pages of the turn that fell out of the window, and a
sequence of any length holds the same pages. That is safe because rows are written when the step that computed them is
over, and the next step needs ``window - 1`` tokens back at most.

Pages may be shared (see :mod:`pwjax.memory.prefix`): all of them have one owner, and each counts the slots that hold
it and what else keeps it. A page nobody refers to is free.

A released page keeps its last words, which may read as NaN: attention must mask by length with ``where``, never by
multiplication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import ceil_div
from pwjax.memory.allocator import PageAllocator, PageError

# Table columns (one turn of one slot, every layer) that one scatter sets.
UPDATE_TURNS = 16


# Name under which all KV pages are owned.
KV_OWNER = "kv"


@dataclass(frozen=True)
class KVKind:
    """KV of the layers of one kind, for sequences of at most ``max_tokens``.

    ``row_words`` is one K (or V) row of one token in uint32 words, in the cache dtype; ``window`` tokens that a query
    sees, itself included (None: all). ValueError for sizes that a page cannot hold.
    """

    layers: int
    row_words: int
    page_words: int
    max_tokens: int
    window: int | None = None

    def __post_init__(self):
        if min(self.layers, self.max_tokens, self.row_words) < 1 or self.row_words > self.page_words:
            raise ValueError(f"a page of {self.page_words} words cannot hold a KV row of {self.row_words} words")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window holds at least the query itself, got {self.window} tokens")

    @property
    def page_tokens(self) -> int:
        """Tokens of one page."""
        return self.page_words // self.row_words

    @property
    def columns(self) -> int:
        """Columns of the table: turns of the longest sequence, or of what a window can reach back to."""
        turns = ceil_div(self.max_tokens, self.page_tokens)
        return turns if self.window is None else min(turns, ceil_div(self.window - 1, self.page_tokens) + 1)

    @property
    def wraps(self) -> bool:
        """Whether the table is a ring that a sequence may write over."""
        return self.columns < ceil_div(self.max_tokens, self.page_tokens)

    @property
    def turn_pages(self) -> int:
        """Pages of one turn: K and V of every layer."""
        return 2 * self.layers

    def turns(self, tokens: int) -> int:
        """Columns that a sequence of ``tokens`` tokens takes."""
        return min(ceil_div(tokens, self.page_tokens), self.columns)

    def pages(self, tokens: int) -> int:
        """Pages that a sequence of ``tokens`` tokens takes."""
        return self.turns(tokens) * self.turn_pages

    def table_shape(self, slots: int) -> tuple[int, int, int, int]:
        """Shape of the int32 table."""
        return (slots, self.layers, 2, self.columns)


def _set_turns(table: jax.Array, slot: jax.Array, turn: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[slot, :, :, turn].set(ids, mode="drop", unique_indices=True)


def _clear_slot(table: jax.Array, slot: jax.Array) -> jax.Array:
    return table.at[slot].set(0, mode="drop")


@lru_cache(maxsize=32)
def compile_kv_table_updates(shape: tuple[int, ...]) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Programs that set up to ``UPDATE_TURNS`` columns and clear one slot of an int32 table, which is donated."""
    spec = jax.ShapeDtypeStruct
    table, index = spec(shape, jnp.int32), spec((UPDATE_TURNS,), jnp.int32)
    ids = spec((UPDATE_TURNS, *shape[1:3]), jnp.int32)
    set_turns = jax.jit(_set_turns, donate_argnums=0).lower(table, index, index, ids).compile()
    clear = jax.jit(_clear_slot, donate_argnums=0).lower(table, spec((), jnp.int32)).compile()
    return set_turns, clear


class _Table:
    """Table of one kind: a host mirror, and a device copy that follows it at :meth:`apply`."""

    def __init__(self, kind: KVKind, slots: int):
        self.kind, self.slots = kind, slots
        self.pages = np.zeros(kind.table_shape(slots), np.int32)
        self.turns = [0] * slots
        self._pushed = [0] * slots  # columns of which the device table is up to date
        self._shown: set[int] = set()  # slots of which the device table shows anything
        self._stale: set[int] = set()  # slots whose device row still shows released pages
        self._set_turns, self._clear = compile_kv_table_updates(self.pages.shape)
        self.device = jnp.zeros(self.pages.shape, jnp.int32)

    def held(self, slot: int) -> np.ndarray:
        """Page ids of a slot."""
        return self.pages[slot, :, :, : self.turns[slot]].reshape(-1)

    def needed(self, slot: int, tokens: int) -> int:
        """Pages that a slot lacks for ``tokens`` tokens."""
        return max(0, self.kind.turns(tokens) - self.turns[slot]) * self.kind.turn_pages

    def room(self, slot: int) -> int:
        """Tokens that fit in the pages of a slot; a full ring takes any number."""
        full = self.turns[slot] == self.kind.columns
        return self.kind.max_tokens if full else self.turns[slot] * self.kind.page_tokens

    def columns(self, slot: int, first: int, end: int) -> np.ndarray:
        """Page ids int32[turns, turn_pages] of columns ``first..end-1``."""
        columns = self.pages[slot, :, :, first:end].transpose(2, 0, 1)
        return columns.reshape(end - first, self.kind.turn_pages).copy()

    def put(self, slot: int, first: int, ids: np.ndarray) -> None:
        """Make ids[n, turn_pages] the columns from ``first`` on, which goes no further than the end."""
        n = len(ids)
        self.pages[slot, :, :, first : first + n] = ids.reshape(n, self.kind.layers, 2).transpose(1, 2, 0)
        self.turns[slot] = max(self.turns[slot], first + n)
        self._pushed[slot] = min(self._pushed[slot], first)

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """Give a slot more turns."""
        self.put(slot, self.turns[slot], ids.reshape(-1, self.kind.turn_pages))

    def clear(self, slot: int) -> None:
        """Forget the pages of a slot."""
        self.pages[slot] = 0
        if slot in self._shown:
            self._shown.remove(slot)
            self._stale.add(slot)
        self.turns[slot] = self._pushed[slot] = 0

    def places(self, slot: int, start: int, count: int, width: int, dropped: int) -> tuple[np.ndarray, np.ndarray]:
        """See :meth:`KVPages.places`; page ``dropped`` is past the arena."""
        kind = self.kind
        token = np.arange(start, start + count)
        page = np.full((kind.layers, 2, width), dropped, np.int32)
        word = np.zeros((kind.layers, 2, width), np.int32)
        page[:, :, :count] = self.pages[slot][:, :, token // kind.page_tokens % kind.columns]
        word[:, :, :count] = token % kind.page_tokens * kind.row_words
        if kind.window is not None:
            # No later query sees these, and in a ring their places are those of newer tokens.
            page[:, :, : max(0, count - (kind.window - 1))] = dropped
        return page, word

    def apply(self) -> bool:
        """Carry releases and new turns to the device table; False where nothing changed."""
        columns = [(s, t) for s in range(self.slots) for t in range(self._pushed[s], self.turns[s])]
        if not columns and not self._stale:
            return False
        for slot in sorted(self._stale):
            self.device = self._clear(self.device, np.int32(slot))
        for first in range(0, len(columns), UPDATE_TURNS):
            chunk = np.array(columns[first : first + UPDATE_TURNS])
            # Padding is past the end and distinct, so it is dropped; -1 would wrap to the last slot.
            slot = np.arange(self.slots, self.slots + UPDATE_TURNS, dtype=np.int32)
            turn, ids = np.zeros(UPDATE_TURNS, np.int32), np.zeros((UPDATE_TURNS, self.kind.layers, 2), np.int32)
            slot[: len(chunk)], turn[: len(chunk)] = chunk[:, 0], chunk[:, 1]
            ids[: len(chunk)] = self.pages[chunk[:, 0], :, :, chunk[:, 1]]
            self.device = self._set_turns(self.device, slot, turn, ids)
        self._stale.clear()
        self._shown |= {slot for slot, _ in columns}
        self._pushed = list(self.turns)
        return True


class KVPages:
    """KV pages of ``slots`` sequences, with one table for each of ``kinds``; 0 is the null page in all of them."""

    def __init__(self, allocator: PageAllocator, kinds: Sequence[KVKind], slots: int):
        if slots < 1 or not kinds or len({kind.max_tokens for kind in kinds}) != 1:
            raise ValueError(f"KV pages need slots and kinds for equally long sequences, got {slots} and {kinds}")
        self.allocator = allocator
        self.kinds, self.slots, self.max_tokens = tuple(kinds), slots, kinds[0].max_tokens
        self.peak_pages = 0
        # Page contents to copy, ids [n] to ids [n], before anything reads or writes the arena again.
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        self._held = np.zeros(allocator.num_pages, np.int32)  # slots that hold a page
        self._kept = np.zeros(allocator.num_pages, np.int32)  # other references
        self._tables = [_Table(kind, slots) for kind in kinds]

    @property
    def table(self) -> tuple[jax.Array, ...]:
        """The device tables, one a kind; :meth:`apply` deletes them, so fetch them anew for every dispatch."""
        return tuple(table.device for table in self._tables)

    @property
    def pages(self) -> tuple[np.ndarray, ...]:
        """Host mirrors of the tables, int32[slots, layers, 2, columns]; read them, never write."""
        return tuple(table.pages for table in self._tables)

    @property
    def nbytes(self) -> int:
        """Bytes of the device tables."""
        return sum(table.pages.nbytes for table in self._tables)

    @property
    def used_pages(self) -> int:
        """KV pages in all, each counted once: of slots, and what is kept beside."""
        return self.allocator.pages_of(KV_OWNER)

    def slot_pages(self, slot: int) -> int:
        """Pages that a slot holds."""
        return sum(table.turns[slot] * table.kind.turn_pages for table in self._tables)

    def reserved_tokens(self, slot: int) -> int:
        """Tokens that fit in the pages a slot holds."""
        return min(self.max_tokens, *(table.room(slot) for table in self._tables))

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of ``tokens`` tokens takes in all."""
        return sum(kind.pages(tokens) for kind in self.kinds)

    def pages_needed(self, slot: int, tokens: int) -> int:
        """Pages a slot lacks to hold ``tokens`` tokens in all; 0 where it has them. ValueError past the maximum."""
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(f"a slot holds 0..{self.max_tokens} tokens, got {tokens}")
        return sum(table.needed(slot, tokens) for table in self._tables)

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all, in every layer; False and no change where the pages are not free."""
        ids = self.allocator.alloc(self.pages_needed(slot, tokens), KV_OWNER)
        if ids is None:
            return False
        self._held[ids] += 1
        for table in self._tables:
            more = table.needed(slot, tokens)
            table.extend(slot, ids[:more])
            ids = ids[more:]
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return True

    def release(self, slot: int) -> int:
        """Take a slot's pages away; returns how many are free now. Rows in flight must then be dropped."""
        held = np.concatenate([table.held(slot) for table in self._tables])
        for table in self._tables:
            table.clear(slot)
        freed = self._unrefer(self._held, held)
        # A copy for a slot that ended before it was made would land in pages of the next owner.
        self.copies = [(source, target) for source, target in self.copies if self.allocator.owns(target, KV_OWNER)]
        return freed

    def columns(self, slot: int, kind: int, first: int, end: int) -> np.ndarray:
        """Page ids int32[turns, turn_pages] of a slot's columns ``first..end-1``."""
        return self._tables[kind].columns(slot, first, end)

    def share(self, slot: int, kind: int, first: int, ids: np.ndarray) -> None:
        """Make KV pages int32[n, turn_pages] a slot's columns from ``first`` on; what it had there is given back."""
        table = self._tables[kind]
        old = table.columns(slot, first, max(first, min(table.turns[slot], first + len(ids)))).reshape(-1)
        self._held[ids.reshape(-1)] += 1
        table.put(slot, first, ids)
        self._unrefer(self._held, old)

    def keep(self, ids: np.ndarray) -> None:
        """Refer to distinct KV pages once more, so that they outlive the slots that hold them."""
        self._kept[ids.reshape(-1)] += 1

    def drop(self, ids: np.ndarray) -> int:
        """Undo a :meth:`keep`; returns how many pages are free now."""
        return self._unrefer(self._kept, ids.reshape(-1))

    def only_kept(self) -> np.ndarray:
        """bool[num_pages]: pages that are kept and in no slot."""
        return (self._kept > 0) & (self._held == 0)

    def _unrefer(self, counts: np.ndarray, ids: np.ndarray) -> int:
        if np.any(counts[ids] < 1):
            raise PageError("a KV page was given back more often than it was taken")
        counts[ids] -= 1
        unused = ids[self._held[ids] + self._kept[ids] == 0]
        self.allocator.free(unused, KV_OWNER)
        return len(unused)

    def places(self, slot: int, start: int, count: int, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where tokens ``start..start+count-1`` go: for each kind, page and first word, int32[layers, 2, width].

        What a commit drops has a page past the arena: columns from ``count`` on, and tokens that a window has passed
        by the end of these. :class:`PageError` where the tokens are not all reserved.
        """
        if not 0 <= count <= width or start < 0 or start + count > self.reserved_tokens(slot):
            have = self.reserved_tokens(slot)
            raise PageError(f"slot {slot} has room for {have} tokens, asked for {start}..{start + count - 1}")
        return [table.places(slot, start, count, width, self.allocator.num_pages) for table in self._tables]

    def apply(self) -> bool:
        """Carry releases and new turns to the device tables; False where nothing changed."""
        return any([table.apply() for table in self._tables])

    def check_invariants(self, kept: np.ndarray | None = None) -> None:
        """Raise :class:`PageError` unless references and owners are as the tables and ``kept`` int[num_pages] say."""
        held = np.zeros_like(self._held)
        for slot in range(self.slots):
            used = np.concatenate([table.held(slot) for table in self._tables])
            spare = any(np.any(table.pages[slot, :, :, table.turns[slot] :]) for table in self._tables)
            if len(np.unique(used)) != len(used) or spare:
                raise PageError(f"slot {slot} repeats a page or shows one past its tokens")
            held[used] += 1
        if not np.array_equal(held, self._held) or (kept is not None and not np.array_equal(kept, self._kept)):
            raise PageError("references to KV pages do not match the tables")
        if not all(self.allocator.owns(ids, KV_OWNER) for copy in self.copies for ids in copy):
            raise PageError("a copy is due between pages that are not KV")
        if not np.array_equal(np.flatnonzero(held + self._kept), self.allocator.owned(KV_OWNER)):
            raise PageError("KV pages are owned without a reference, or referred to without being owned")

"""KV pages of the fixed slots: reservation, places of tokens, and the device tables that attention reads.

Each kind of attention has a table of its own, for its rows differ in width. K and V of a layer lie apart. A page holds
``page_tokens`` whole rows (not always a power of two)::

    table[slot, layer, 0 or 1, turn % columns] = page of tokens turn*page_tokens .. (turn+1)*page_tokens - 1

so one more turn of a slot costs ``2 * layers`` pages. Where a kind has a window, its table is a ring of just enough
columns to hold it: a turn that comes round writes over the pages of the turn that fell out of the window, and a
sequence of any length holds the same pages. That is safe because rows are written when the step that computed them is
over, and the next step needs ``window - 1`` tokens back at most.

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


def kv_owner(slot: int) -> tuple[str, int]:
    """Name under which a slot's pages are owned."""
    return ("kv", int(slot))


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
        self._pushed = [0] * slots  # columns the device table already shows
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

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """Give a slot more turns."""
        old, more = self.turns[slot], len(ids) // self.kind.turn_pages
        self.pages[slot, :, :, old : old + more] = ids.reshape(more, self.kind.layers, 2).transpose(1, 2, 0)
        self.turns[slot] = old + more

    def clear(self, slot: int) -> None:
        """Forget the pages of a slot."""
        self.pages[slot] = 0
        if self._pushed[slot]:
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
        """Pages that all slots hold together."""
        return sum(self.slot_pages(slot) for slot in range(self.slots))

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
        ids = self.allocator.alloc(self.pages_needed(slot, tokens), kv_owner(slot))
        if ids is None:
            return False
        for table in self._tables:
            more = table.needed(slot, tokens)
            table.extend(slot, ids[:more])
            ids = ids[more:]
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return True

    def release(self, slot: int) -> int:
        """Free every page of a slot; returns how many. Rows of a dispatch in flight must then be dropped."""
        held = np.concatenate([table.held(slot) for table in self._tables])
        self.allocator.free(held, kv_owner(slot))
        for table in self._tables:
            table.clear(slot)
        return len(held)

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

    def check_invariants(self) -> None:
        """Raise :class:`PageError` unless the tables hold exactly the pages that each slot owns, each once."""
        for slot in range(self.slots):
            used = np.concatenate([table.held(slot) for table in self._tables])
            spare = any(np.any(table.pages[slot, :, :, table.turns[slot] :]) for table in self._tables)
            if len(np.unique(used)) != len(used) or spare:
                raise PageError(f"slot {slot} repeats a page or shows one past its tokens")
            if len(used) != self.allocator.pages_of(kv_owner(slot)) or not self.allocator.owns(used, kv_owner(slot)):
                raise PageError(f"slot {slot} points at pages it does not own, or owns pages it does not point at")

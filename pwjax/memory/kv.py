"""KV pages of the fixed slots: reservation, places of tokens, and the device table that attention reads.

K and V of a layer lie apart. A page holds ``page_tokens`` whole rows (not always a power of two)::

    table[slot, layer, 0 or 1, turn] = page of tokens turn*page_tokens .. (turn+1)*page_tokens - 1

so one more turn of a slot costs ``2 * layers`` pages. A released page keeps its last words, which may read as NaN:
attention must mask by length with ``where``, never by multiplication.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import RowLayout, ceil_div
from pwjax.memory.allocator import PageAllocator, PageError

# Table columns (one turn of one slot, every layer) that one scatter sets.
UPDATE_TURNS = 16


def kv_owner(slot: int) -> tuple[str, int]:
    """Name under which a slot's pages are owned."""
    return ("kv", int(slot))


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


class KVPages:
    """KV pages of ``slots`` sequences of at most ``max_tokens`` tokens in ``layers`` layers.

    ``row_words`` is one K (or V) row of one token in uint32 words, in the cache dtype. Host mirror and device table
    are int32[slots, layers, 2, max_turns]; 0 is the null page. ValueError for sizes that a page cannot hold.
    """

    def __init__(
        self, allocator: PageAllocator, *, slots: int, layers: int, max_tokens: int, page_words: int, row_words: int
    ):
        if min(slots, layers, max_tokens, row_words) < 1 or row_words > page_words:
            raise ValueError(f"a page of {page_words} words cannot hold a KV row of {row_words} words")
        layout = RowLayout(max_tokens, row_words, page_words)
        self.allocator = allocator
        self.slots, self.layers, self.max_tokens = slots, layers, max_tokens
        self.row_words, self.page_tokens, self.max_turns = row_words, layout.rows_per_page, layout.pages
        self.pages = np.zeros((slots, layers, 2, self.max_turns), np.int32)
        self.peak_pages = 0
        self._turns = [0] * slots
        self._pushed = [0] * slots  # turns the device table already shows
        self._stale: set[int] = set()  # slots whose device row still shows released pages
        self._set_turns, self._clear = compile_kv_table_updates(self.pages.shape)
        self._table = jnp.zeros(self.pages.shape, jnp.int32)

    @property
    def table(self) -> jax.Array:
        """The device table; :meth:`apply` deletes it, so fetch it anew for every dispatch."""
        return self._table

    @property
    def nbytes(self) -> int:
        """Bytes of the device table."""
        return self.pages.nbytes

    @property
    def used_pages(self) -> int:
        """Pages that all slots hold together."""
        return sum(self._turns) * 2 * self.layers

    def slot_pages(self, slot: int) -> int:
        """Pages that a slot holds."""
        return self._turns[slot] * 2 * self.layers

    def reserved_tokens(self, slot: int) -> int:
        """Tokens that fit in the pages a slot holds."""
        return min(self._turns[slot] * self.page_tokens, self.max_tokens)

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of ``tokens`` tokens takes in all."""
        return ceil_div(tokens, self.page_tokens) * 2 * self.layers

    def pages_needed(self, slot: int, tokens: int) -> int:
        """Pages a slot lacks to hold ``tokens`` tokens in all; 0 where it has them. ValueError past the maximum."""
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(f"a slot holds 0..{self.max_tokens} tokens, got {tokens}")
        return max(0, self.pages_for(tokens) - self.slot_pages(slot))

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all, in every layer; False and no change where the pages are not free."""
        need = self.pages_needed(slot, tokens)
        ids = self.allocator.alloc(need, kv_owner(slot))
        if ids is None:
            return False
        old = self._turns[slot]
        new = old + need // (2 * self.layers)
        # Turn-major, so that ids do not depend on how many turns one call reserves.
        self.pages[slot, :, :, old:new] = ids.reshape(new - old, self.layers, 2).transpose(1, 2, 0)
        self._turns[slot] = new
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return True

    def release(self, slot: int) -> int:
        """Free every page of a slot; returns how many. Rows of a dispatch in flight must then be dropped."""
        held = self.pages[slot, :, :, : self._turns[slot]].reshape(-1)
        self.allocator.free(held, kv_owner(slot))
        self.pages[slot] = 0
        if self._pushed[slot]:
            self._stale.add(slot)
        self._turns[slot] = self._pushed[slot] = 0
        return len(held)

    def positions(self, slot: int, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens ``start..start+n-1`` go: page and first word, both int32[layers, 2, n].

        :class:`PageError` where they are not all reserved.
        """
        if start < 0 or n < 0 or start + n > self.reserved_tokens(slot):
            have = self.reserved_tokens(slot)
            raise PageError(f"slot {slot} has room for {have} tokens, asked for {start}..{start + n - 1}")
        token = np.arange(start, start + n)
        page = self.pages[slot][:, :, token // self.page_tokens]
        word = (token % self.page_tokens * self.row_words).astype(np.int32)
        return page, np.broadcast_to(word, page.shape)

    def dropped(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Like :meth:`positions` for ``n`` padding tokens: pages past the arena, which a commit drops."""
        shape = (self.layers, 2, n)
        return np.full(shape, self.allocator.num_pages, np.int32), np.zeros(shape, np.int32)

    def apply(self) -> bool:
        """Carry releases and new turns to the device table; False where nothing changed."""
        columns = [(s, t) for s in range(self.slots) for t in range(self._pushed[s], self._turns[s])]
        if not columns and not self._stale:
            return False
        for slot in sorted(self._stale):
            self._table = self._clear(self._table, np.int32(slot))
        for first in range(0, len(columns), UPDATE_TURNS):
            chunk = np.array(columns[first : first + UPDATE_TURNS])
            # Padding is past the end and distinct, so it is dropped; -1 would wrap to the last slot.
            slot = np.arange(self.slots, self.slots + UPDATE_TURNS, dtype=np.int32)
            turn, ids = np.zeros(UPDATE_TURNS, np.int32), np.zeros((UPDATE_TURNS, self.layers, 2), np.int32)
            slot[: len(chunk)], turn[: len(chunk)] = chunk[:, 0], chunk[:, 1]
            ids[: len(chunk)] = self.pages[chunk[:, 0], :, :, chunk[:, 1]]
            self._table = self._set_turns(self._table, slot, turn, ids)
        self._stale.clear()
        self._pushed = list(self._turns)
        return True

    def check_invariants(self) -> None:
        """Raise :class:`PageError` unless the table holds exactly the pages that each slot owns, each once."""
        for slot in range(self.slots):
            used = self.pages[slot, :, :, : self._turns[slot]].reshape(-1)
            if len(np.unique(used)) != len(used) or np.any(self.pages[slot, :, :, self._turns[slot] :]):
                raise PageError(f"slot {slot} repeats a page or shows one past its tokens")
            if len(used) != self.allocator.pages_of(kv_owner(slot)) or not self.allocator.owns(used, kv_owner(slot)):
                raise PageError(f"slot {slot} points at pages it does not own, or owns pages it does not point at")

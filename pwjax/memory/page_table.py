"""Which pages hold which block at which bits: a small pytree for the kernels and its mirror on the host.

The mirror is the truth: :meth:`PageTableState.set_block` changes it, and :meth:`PageTableState.apply` carries the
changed blocks to the device with a donated scatter of fixed size. One ``apply`` is one epoch. The plan is data: no
shape depends on it, so no change of precision compiles anything.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.memory.allocator import PageAllocator, PageError

# Blocks one scatter changes; a larger plan takes several calls within one epoch.
UPDATE_BLOCKS = 32


@partial(jax.tree_util.register_dataclass, data_fields=("bits", "pages", "epoch"), meta_fields=())
@dataclass(frozen=True)
class PageTable:
    """What the kernels read: ``bits`` int32[L, E, 2], ``pages`` int32[L, E, 2, S], ``epoch`` int32[].

    ``bits`` 0 means not loaded. Slots that a block does not use hold page 0, the null page.
    """

    bits: jax.Array
    pages: jax.Array
    epoch: jax.Array


def block_owner(block: int) -> tuple[str, int]:
    """Name under which a block's resident pages are owned."""
    return ("block", int(block))


def _update(table: PageTable, epoch: jax.Array, blocks: jax.Array, bits: jax.Array, pages: jax.Array) -> PageTable:
    flat = table.bits.reshape(-1).at[blocks].set(bits, mode="drop", unique_indices=True)
    rows = table.pages.reshape(-1, pages.shape[1]).at[blocks].set(pages, mode="drop", unique_indices=True)
    return PageTable(flat.reshape(table.bits.shape), rows.reshape(table.pages.shape), epoch)


def _empty(layers: int, experts: int, slots: int) -> PageTable:
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    return PageTable(zeros((layers, experts, 2)), zeros((layers, experts, 2, slots)), zeros(()))


@lru_cache(maxsize=32)
def compile_table_update(layers: int, experts: int, slots: int, width: int = UPDATE_BLOCKS) -> jax.stages.Compiled:
    """Program ``(table, epoch, blocks int32[C], bits int32[C], pages int32[C, S]) -> table``, the table donated."""
    spec = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    table = jax.eval_shape(partial(_empty, layers, experts, slots))
    lowered = jax.jit(_update, donate_argnums=0).lower(
        table, spec(()), spec((width,)), spec((width,)), spec((width, slots))
    )
    return lowered.compile()


class PageTableState:
    """Host mirror ``bits`` int32[L, E, 2], ``pages`` int32[L, E, 2, S] of the device table, which it owns.

    Blocks are counted ``(layer * experts + expert) * 2 + matrix``. Only the engine thread may change it.
    """

    def __init__(self, layers: int, experts: int, geometry: Geometry):
        self.layers, self.experts, self.geometry = layers, experts, geometry
        self.blocks = layers * experts * 2
        self.bits = np.zeros((layers, experts, 2), np.int32)
        self.pages = np.zeros((layers, experts, 2, geometry.slots), np.int32)
        self.epoch = 0
        self._dirty: set[int] = set()
        self._program = compile_table_update(layers, experts, geometry.slots)
        self._table = _empty(layers, experts, geometry.slots)

    @property
    def table(self) -> PageTable:
        """The device table of the current epoch; :meth:`apply` deletes it, so fetch it anew for every dispatch."""
        return self._table

    @property
    def nbytes(self) -> int:
        """Bytes of the device table."""
        return self.bits.nbytes + self.pages.nbytes + 4

    def locate(self, block: int) -> tuple[int, int, int]:
        """``(layer, expert, matrix)`` of a block."""
        return block // (2 * self.experts), block // 2 % self.experts, block % 2

    def block_bits(self, block: int) -> int:
        """Committed bits of a block, 0 where it is not loaded."""
        return int(self.bits.reshape(-1)[block])

    def block_pages(self, block: int) -> np.ndarray:
        """int32 ids of a block's pages in the order of ``geometry.table_slots``; empty where it is not loaded."""
        bits = self.block_bits(block)
        slots = self.geometry.table_slots(block % 2, bits) if bits else ()
        return self.pages.reshape(self.blocks, -1)[block][list(slots)]

    def set_block(self, block: int, bits: int, page_ids: np.ndarray) -> None:
        """Point a block at ``page_ids`` (in the order of ``geometry.table_slots``); seen by kernels after ``apply``.

        ValueError where the count does not fit the bits or an id is the null page.
        """
        slots = self.geometry.table_slots(block % 2, bits)
        page_ids = np.asarray(page_ids, np.int32)
        if page_ids.shape != (len(slots),) or np.any(page_ids < 1):
            raise ValueError(f"block {block} at {bits} bits takes {len(slots)} pages, got {page_ids.tolist()}")
        row = self.pages.reshape(self.blocks, -1)[block]
        row[:] = 0
        row[list(slots)] = page_ids
        self.bits.reshape(-1)[block] = bits
        self._dirty.add(block)

    def apply(self) -> bool:
        """Carry every changed block to the device as one new epoch; False and no epoch where nothing changed."""
        if not self._dirty:
            return False
        self.epoch += 1
        changed = np.array(sorted(self._dirty), np.int32)
        rows = self.pages.reshape(self.blocks, -1)
        for start in range(0, len(changed), UPDATE_BLOCKS):
            chunk = changed[start : start + UPDATE_BLOCKS]
            # Padding is past the end and distinct, so it is dropped; -1 would wrap to the last block.
            blocks = np.arange(self.blocks, self.blocks + UPDATE_BLOCKS, dtype=np.int32)
            bits, pages = np.zeros(UPDATE_BLOCKS, np.int32), np.zeros((UPDATE_BLOCKS, rows.shape[1]), np.int32)
            blocks[: len(chunk)], bits[: len(chunk)] = chunk, self.bits.reshape(-1)[chunk]
            pages[: len(chunk)] = rows[chunk]
            self._table = self._program(self._table, np.int32(self.epoch), blocks, bits, pages)
        self._dirty.clear()
        return True

    def validate(self, allocator: PageAllocator) -> None:
        """Raise :class:`PageError` unless every block points at exactly the pages it owns and at no other."""
        seen: set[int] = set()
        for block in range(self.blocks):
            ids, owner = self.block_pages(block), block_owner(block)
            row = self.pages.reshape(self.blocks, -1)[block]
            if np.count_nonzero(row) != len(ids):
                raise PageError(f"block {block} has pages in slots that its bits do not use")
            if len(ids) != allocator.pages_of(owner) or not allocator.owns(ids, owner):
                raise PageError(f"block {block} points at pages it does not own, or owns pages it does not point at")
            if not seen.isdisjoint(ids.tolist()) or len(set(ids.tolist())) != len(ids):
                raise PageError(f"block {block} shares a page")
            seen.update(ids.tolist())

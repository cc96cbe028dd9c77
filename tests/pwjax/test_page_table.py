"""The page table: the device shows what the host says, in place, one epoch an apply."""

import jax
import numpy as np
import pytest

from pallas_kernels.pages import BlockShape, Geometry
from pwjax.memory.allocator import PageAllocator, PageError
from pwjax.memory.arena import program_memory
from pwjax.memory.page_table import PageTable, PageTableState, block_owner, compile_table_update

GEOMETRY = Geometry(64, (2, 3, 4), True, BlockShape(32, 64, 4), BlockShape(32, 32, 4))


def shown(state: PageTableState):
    return jax.tree.map(np.array, state.table)


def place(state, allocator, block, bits):
    ids = allocator.alloc(GEOMETRY.block_pages(block % 2, bits), block_owner(block))
    state.set_block(block, bits, ids)
    return ids


def test_empty_table_points_at_the_null_page():
    state = PageTableState(2, 3, GEOMETRY)
    table = shown(state)
    assert table.bits.shape == (2, 3, 2) and table.pages.shape == (2, 3, 2, GEOMETRY.slots)
    assert not table.bits.any() and not table.pages.any() and table.epoch == 0
    assert state.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state.table))
    assert not state.apply() and state.epoch == 0


def test_apply_shows_every_change_as_one_epoch():
    state, allocator = PageTableState(4, 10, GEOMETRY), PageAllocator(2000)
    bits = [(2, 3, 4, 16)[block % 4] for block in range(80)]
    for block in range(80):  # more blocks than one scatter takes
        place(state, allocator, block, bits[block])
    assert state.apply() and state.epoch == 1 and not state.apply()
    table = shown(state)
    assert table.epoch == 1
    np.testing.assert_array_equal(table.bits.reshape(-1), bits)
    np.testing.assert_array_equal(table.pages, state.pages)
    state.validate(allocator)
    ids = state.block_pages(5)
    layer, expert, matrix = state.locate(5)
    assert (layer, expert, matrix) == (0, 2, 1)
    np.testing.assert_array_equal(ids, table.pages[layer, expert, matrix][list(GEOMETRY.table_slots(1, bits[5]))])


def test_unused_slots_return_to_the_null_page():
    state, allocator = PageTableState(1, 1, GEOMETRY), PageAllocator(200)
    high = place(state, allocator, 0, 4)
    state.apply()
    allocator.free(high, block_owner(0))
    place(state, allocator, 0, 2)
    state.apply()
    table = shown(state)
    unused = sorted(set(range(GEOMETRY.slots)) - set(GEOMETRY.table_slots(0, 2)))
    assert not table.pages[0, 0, 0, unused].any() and table.bits[0, 0, 0] == 2 and table.epoch == 2
    state.validate(allocator)


def test_update_is_in_place_and_deletes_the_old_table():
    state, allocator = PageTableState(2, 3, GEOMETRY), PageAllocator(400)
    old, pointer = state.table, state.table.pages.unsafe_buffer_pointer()
    place(state, allocator, 3, 4)
    state.apply()
    assert state.table.pages.unsafe_buffer_pointer() == pointer and old.pages.is_deleted()
    small, large = (program_memory(compile_table_update(layers, 60, 40)) for layers in (2, 48))
    assert small.temp_bytes == large.temp_bytes and large.alias_bytes >= 48 * 60 * 2 * 41 * 4


def test_table_is_a_pytree():
    state = PageTableState(2, 3, GEOMETRY)
    leaves, tree = jax.tree.flatten(state.table)
    assert len(leaves) == 3 and isinstance(jax.tree.unflatten(tree, leaves), PageTable)
    assert int(jax.jit(lambda table: table.bits.sum() + table.epoch)(state.table)) == 0


def test_wrong_page_counts_and_null_pages_are_refused():
    state = PageTableState(1, 1, GEOMETRY)
    with pytest.raises(ValueError, match="takes"):
        state.set_block(0, 2, np.array([1]))
    with pytest.raises(ValueError, match="takes"):
        state.set_block(0, 2, np.zeros(GEOMETRY.block_pages(0, 2), int))
    with pytest.raises(ValueError, match="bits"):
        state.set_block(0, 7, np.array([1]))


def test_validate_finds_pages_of_others():
    state, allocator = PageTableState(1, 2, GEOMETRY), PageAllocator(200)
    ids = [place(state, allocator, block, 3) for block in range(4)]
    state.validate(allocator)
    state.set_block(2, 3, ids[0])
    with pytest.raises(PageError, match="block 2"):
        state.validate(allocator)
    state.set_block(2, 3, ids[2])
    allocator.free(ids[2][-1:], block_owner(2))
    with pytest.raises(PageError, match="block 2"):
        state.validate(allocator)

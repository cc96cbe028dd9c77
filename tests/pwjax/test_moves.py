"""Moves of one block: their states, how many pages they reserve and free, and moves larger than staging."""

import numpy as np
import pytest
from pager_rig import BLOCKS, GEOMETRY, WIDTHS, Rig

from pwjax.memory.allocator import PageError
from pwjax.memory.arena import padded_pages
from pwjax.memory.faults import Fate
from pwjax.memory.moves import TRANSITIONS, MoveState, largest_demotion_pages, make_move, move_shape


@pytest.mark.parametrize("state", MoveState)
def test_a_move_refuses_every_transition_but_the_listed_ones(state):
    for target in MoveState:
        shape = move_shape(GEOMETRY, 0, 3, 2, 32)
        old, reserved = np.arange(1, 1 + GEOMETRY.block_pages(0, 3)), np.arange(100, 100 + shape.reserve)
        move = make_move(0, 3, 2, shape, old, reserved, 32)
        move.state = state
        if target in TRANSITIONS[state]:
            move.enter(target)
            assert move.state is target
        else:
            with pytest.raises(PageError, match=f"{state.name} to {target.name}"):
                move.enter(target)


@pytest.mark.parametrize("bits", [(2, 3), (4, 2), (16, 2), (2, 16), (0, 4), (3, 4)])
@pytest.mark.parametrize("part", [4, 8, 64])
@pytest.mark.parametrize("matrix", [0, 1])
def test_move_shapes_balance(bits, part, matrix):
    old, new = bits
    shape = move_shape(GEOMETRY, matrix, old, new, part)
    before = GEOMETRY.block_pages(matrix, old) if old else 0
    assert before + shape.reserve - shape.frees == GEOMETRY.block_pages(matrix, new)
    assert shape.kept + len(shape.writes) == GEOMETRY.block_pages(matrix, new)
    if new > old:
        assert shape.reserve == len(shape.writes)  # the old epoch stays whole
    assert shape.reserve >= 0 and shape.frees >= 0 and padded_pages(len(shape.writes), WIDTHS) >= len(shape.writes)


def test_staging_that_holds_the_largest_demotion_makes_every_demotion_free():
    part = largest_demotion_pages(GEOMETRY)
    for matrix in (0, 1):
        for high in GEOMETRY.all_bits:
            for low in (b for b in GEOMETRY.all_bits if b < high):
                assert move_shape(GEOMETRY, matrix, high, low, part).reserve == 0
    assert any(move_shape(GEOMETRY, m, 16, 4, part - 1).reserve for m in (0, 1))


def test_a_block_larger_than_staging_moves_in_parts():
    rig = Rig(2, spare=60, staging=4)
    rig.pager.request(np.where(np.arange(BLOCKS) == 1, 16, 2))
    reports = rig.settle()
    parts = -(-GEOMETRY.block_pages(1, 16) // 4)
    assert parts > 3 and len(reports) == parts + 1
    assert [len(r.committed) for r in reports] == [0] * parts + [1]
    rig.check()
    rig.pager.request(np.full(BLOCKS, 3))
    rig.settle()
    rig.check()


def test_a_large_demotion_needs_free_pages_for_all_but_its_last_part():
    shape = move_shape(GEOMETRY, 1, 16, 3, 4)
    assert shape.reserve == len(shape.writes) - ((len(shape.writes) - 1) % 4 + 1) > 0
    rig = Rig(16, spare=shape.reserve, staging=4)
    rig.pager.request(np.where(np.arange(BLOCKS) == 1, 3, 16))
    while not rig.pager.idle:
        rig.boundary()
        rig.check()
    want = GEOMETRY.block_pages(1, 16) - GEOMETRY.block_pages(1, 3)
    assert rig.allocator.free_pages == shape.reserve + want
    blocked = Rig(16, spare=shape.reserve - 1, staging=4)
    blocked.pager.request(np.where(np.arange(BLOCKS) == 1, 3, 16))
    assert blocked.boundary().blocked_pages == 1


def test_a_part_that_fails_returns_the_whole_reservation():
    rig = Rig(2, spare=60, staging=4, fate=lambda job: Fate("fail" if len(rig.transfer.jobs) % 3 == 0 else "ok"))
    rig.pager.request(np.where(np.arange(BLOCKS) == 1, 16, 2))
    for _ in range(12):
        report = rig.boundary()
        rig.check()
        if report.failed:
            assert rig.allocator.free_pages == 60
            break
    else:
        pytest.fail("no part failed")

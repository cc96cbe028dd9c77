"""The pager: what it loads, the order and the cost of its moves, and that a plan compiles nothing."""

import gc

import jax
import numpy as np
import pytest
from pager_rig import BLOCKS, EXPERTS, GEOMETRY, LAYERS, WIDTHS, Clock, Rig, block_pages, plan

from pwjax.memory.allocator import PageAllocator, PageError
from pwjax.memory.arena import Arena
from pwjax.memory.faults import FakeStore, Fate, FaultyTransfer
from pwjax.memory.moves import move_shape
from pwjax.memory.pacing import Pace
from pwjax.memory.page_table import PageTableState
from pwjax.memory.pager import Pager
from pwjax.memory.transfer import StagedPages, SyncTransfer, TransferError


@pytest.mark.parametrize("staging", [4, 7, 32])
def test_load_initial_reports_progress_and_fills_the_table(staging):
    bits, seen = [2, 3, 4, 16, 16, 4, 3, 2], []
    rig = Rig(bits, staging=staging)
    rig.check()
    assert rig.table.epoch == 1 and rig.allocator.free_pages == 0 and rig.pager.idle
    assert rig.pager.counters.pages == rig.allocator.used_pages - rig.filler
    assert rig.pager.counters.staging_peak_pages <= staging
    assert rig.pager.counters.promotions == 0
    fresh = Pager(
        Arena(200, 64, WIDTHS), PageAllocator(200), PageTableState(LAYERS, EXPERTS, GEOMETRY), GEOMETRY,
        SyncTransfer(rig.store), staging_pages=staging,
    )  # fmt: skip
    fresh.load_initial(np.full(BLOCKS, 2), lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, BLOCKS) for i in range(BLOCKS)]


def test_load_initial_refuses_what_does_not_fit_and_passes_errors_on():
    with pytest.raises(PageError, match="free"):
        Rig(3, pages=20)
    broken = FaultyTransfer(FakeStore(64), lambda job: Fate("fail" if job.block == 5 else "ok"))
    with pytest.raises(TransferError, match="made to fail"):
        Rig(3, transfer=broken)
    rig = Rig(3)
    with pytest.raises(PageError, match="empty table"):
        rig.pager.load_initial(np.full(BLOCKS, 3))


@pytest.mark.parametrize("bits", [[3] * 7, [3] * 7 + [5], [3] * 7 + [0]])
def test_plans_are_checked(bits):
    with pytest.raises(ValueError):
        Rig(3).pager.request(np.array(bits))


def test_staging_must_hold_a_commit():
    with pytest.raises(ValueError, match="staging"):
        Rig(3, staging=3)


@pytest.mark.parametrize(("from_bits", "to_bits"), [(3, 2), (4, 2), (16, 2), (4, 3), (16, 3)])
def test_demotion_needs_no_free_page(from_bits, to_bits):
    rig = Rig(from_bits)
    assert rig.allocator.free_pages == 0
    want = block_pages([from_bits] * BLOCKS) - block_pages([to_bits] * BLOCKS)
    rig.pager.request(np.full(BLOCKS, to_bits))
    assert rig.pager.reserving_pages == 0 and rig.pager.releasing_pages == want
    reports = rig.settle()
    rig.check()
    assert rig.allocator.free_pages == want == sum(c.freed_pages for r in reports for c in r.committed)
    assert rig.pager.counters.demotions == BLOCKS


def test_demotion_between_widths_stages_the_lut_only():
    rig = Rig(4)
    start = len(rig.transfer.jobs)
    rig.pager.request(np.full(BLOCKS, 2))
    rig.settle()
    for job in rig.transfer.jobs[start:]:
        assert len(job.pages) == GEOMETRY.lut_layout(job.block % 2, 2).pages


@pytest.mark.parametrize("to_bits", [3, 4, 16])
def test_promotion_writes_only_reserved_pages_and_frees_the_old_ones_after(to_bits):
    shape = move_shape(GEOMETRY, 0, 2, to_bits, 32)
    rig = Rig(2, spare=shape.reserve)
    old = rig.table.block_pages(0).tolist()
    rig.pager.request(np.where(np.arange(BLOCKS) == 0, to_bits, 2))
    assert rig.pager.reserving_pages == shape.reserve
    rig.boundary()
    assert rig.allocator.free_pages == rig.pager.reserving_pages == 0 and rig.pager.releasing_pages == shape.frees
    rig.check()
    assert rig.pager.committed[0] == 2
    (commit,) = rig.boundary().committed
    rig.check()
    assert (commit.from_bits, commit.to_bits, commit.freed_pages) == (2, to_bits, shape.frees)
    assert rig.allocator.free_pages == shape.frees
    kept = rig.table.block_pages(0).tolist()[: shape.kept]
    assert kept == old[: shape.kept]


def test_promotion_without_pages_waits_and_is_reported():
    rig = Rig(2, spare=3)
    rig.pager.request(np.where(np.arange(BLOCKS) == 1, 16, 2))
    need = move_shape(GEOMETRY, 1, 2, 16, 32).reserve
    report = rig.boundary()
    assert report.blocked_pages == need - 3 and report.queued == 1 and not report.started
    assert rig.allocator.free_pages == 3
    rig.pager.request(np.full(BLOCKS, 2))
    assert rig.pager.idle


def test_demotions_go_first_and_a_full_staging_stops_the_queue():
    rig = Rig(3, spare=40, staging=4)
    rig.pager.request(plan(b0=4, b1=2, b2=4, b3=2))
    started = [rig.boundary().started for _ in range(4)]
    assert started == [(1,), (3,), (0,), (2,)]


def test_order_of_a_request_is_kept():
    rig = Rig(3, spare=40)
    rig.pager.request(plan(b0=2, b3=2, b5=2, b6=4, b7=4), order=[7, 5, 3])
    assert rig.boundary().started == (5, 3, 0, 7, 6)


def test_a_request_leaves_moving_blocks_alone():
    rig = Rig(3, fate=lambda job: Fate("ok", 3))
    rig.pager.request(plan(b0=2))
    rig.boundary()
    assert rig.pager.moving.tolist() == [True] + [False] * 7
    rig.pager.request(plan(b1=2))
    rig.settle()
    np.testing.assert_array_equal(rig.pager.committed, plan(b0=2, b1=2))
    rig.check()


def test_words_of_a_commit_are_gone_before_the_next_copy_starts():
    alive = []

    def fate(job):
        words = [x for x in jax.live_arrays() if x.shape[1:] == (64,) and x.shape[0] in WIDTHS]
        alive.append(sum(x.shape[0] for x in words))
        return Fate()

    rig = Rig(4, fate=fate, staging=4)
    gc.collect()  # what earlier tests left behind must not be counted
    rig.pager.request(np.full(BLOCKS, 2))
    rig.settle()
    assert len(alive) == BLOCKS and set(alive) == {alive[0]}


def test_no_plan_compiles_anything():
    rig = Rig(2, spare=80)
    programs = dict(rig.arena.programs)
    pointer = rig.arena.array.unsafe_buffer_pointer()
    for bits in (3, 2, 16, 4, 2):
        rig.pager.request(np.where(np.arange(BLOCKS) % 4 == 0, bits, 2))
        rig.settle()
    assert rig.arena.programs == programs and rig.arena.array.unsafe_buffer_pointer() == pointer
    rig.check()


class CostlyClock(Clock):
    """Every commit of an arena takes time."""

    def charge(self, arena, seconds):
        commit = arena.commit_pages

        def costly(ids, words):
            self.now += seconds
            commit(ids, words)

        arena.commit_pages = costly


def test_moves_wait_staged_while_the_account_is_empty_and_urgent_demotions_do_not():
    rig = Rig(3, spare=60, staging=64)
    clock = CostlyClock()
    rig.pager.pace = Pace(clock, share=0.02, saved_s=0.001, page_s=0.01)
    clock.charge(rig.arena, 0.01)
    rig.pager.request(plan(b0=2, b1=2, b2=2, b4=4, b5=4))
    assert len(rig.boundary().started) == 5
    clock.now += 0.01
    landed = [rig.boundary().landed]  # one demotion overdraws the account
    assert landed == [(0,)]
    for _ in range(5):
        clock.now += 0.01
        landed.append(rig.boundary().landed)
        rig.check()
    assert not any(landed[1:]) and rig.pager.staged_pages > 0
    report = rig.pager.boundary(rig.index, urgent=True)
    rig.index += 1
    assert report.landed == (1, 2) and len(report.committed) == 2
    while not rig.pager.idle:
        clock.now += 0.01
        rig.boundary()
    rig.check()
    np.testing.assert_array_equal(rig.pager.committed, plan(b0=2, b1=2, b2=2, b4=4, b5=4))
    assert rig.pager.pace.share_spent < 0.03


def test_copies_that_take_processors_from_steps_slow_movement_down():
    def boundaries(taken_s):
        rig = Rig(3, spare=60, staging=64)
        clock = Clock()
        rig.pager.pace = Pace(clock, share=0.02, saved_s=0.001, page_s=0.0)
        submit = rig.transfer.submit

        def timed(job):
            handle = submit(job)
            whole = handle.result()
            handle.result = lambda: StagedPages(whole.words, whole.pages, taken_s)
            return handle

        rig.transfer.submit = timed
        rig.pager.request(plan(b0=2, b1=2, b2=2, b4=4, b5=4))
        while not rig.pager.idle:
            clock.now += 0.01
            rig.boundary()
            rig.check()
        assert rig.pager.pace.copies_s == pytest.approx(5 * taken_s)
        return rig.index

    assert boundaries(0.0) < 5
    assert boundaries(0.01) > 100  # 5 copies of 10 ms at 2 % of steps of 10 ms

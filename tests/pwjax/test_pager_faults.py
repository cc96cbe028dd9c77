"""The pager when copies fail, come late, or end after they were cancelled: nothing is lost and nothing leaks."""

import numpy as np
import pytest
from pager_rig import BLOCKS, Rig, plan

from pwjax.memory.faults import Fate


@pytest.mark.parametrize("kind", ["fail", "short", "narrow"])
@pytest.mark.parametrize("to_bits", [2, 16])
def test_a_broken_copy_leaves_everything_as_it_was_and_is_tried_again_later(kind, to_bits):
    broken = {"left": 2}

    def fate(job):
        broken["left"] -= 1
        return Fate(kind if broken["left"] >= 0 else "ok")

    rig = Rig(3, spare=40, fate=fate)
    free = rig.allocator.free_pages
    rig.pager.request(plan(b2=to_bits))
    assert rig.boundary().started == (2,)
    report = rig.boundary()
    assert [block for block, _ in report.failed] == [2] and not report.committed and not report.started
    assert rig.allocator.free_pages == free and rig.pager.committed[2] == 3 and not rig.pager.idle
    rig.check()
    starts = [bool(rig.boundary().started) for _ in range(4)]
    assert starts == [True, False, False, True]  # backs off one boundary, then two
    rig.settle()
    rig.check()
    assert rig.pager.committed[2] == to_bits and rig.pager.counters.failed == 2


def test_a_block_that_keeps_failing_is_given_up_and_remembered():
    rig = Rig(3, spare=40, fate=lambda job: Fate("fail" if job.block == 4 else "ok"), tries=3)
    rig.pager.request(plan(b4=2, b5=2))
    reports = rig.settle()
    assert [r.given_up for r in reports if r.given_up] == [(4,)]
    assert "made to fail" in reports[-1].failed[0][1]
    assert rig.pager.given_up.tolist() == [b == 4 for b in range(BLOCKS)]
    np.testing.assert_array_equal(rig.pager.committed, plan(b5=2))
    rig.pager.request(plan(b4=4, b5=2))
    assert rig.pager.idle and rig.pager.counters.failed == 3
    rig.check()


def test_only_failures_in_a_row_count():
    fates = ["fail", "ok"] * 4
    rig = Rig(3, spare=40, fate=lambda job: Fate(fates.pop(0)), tries=2)
    for bits in (2, 4, 2, 3):
        rig.pager.request(plan(b4=bits))
        rig.settle()
        assert rig.pager.committed[4] == bits
    assert rig.pager.counters.failed == 4 and not rig.pager.given_up.any()


def test_a_late_copy_is_dropped_and_its_staging_stays_taken():
    rig = Rig(3, spare=40, staging=8, fate=lambda job: Fate("ok", None), late_s=5, tries=2)
    rig.pager.request(plan(b0=4))
    rig.boundary()
    staged = rig.pager.staged_pages
    rig.clock.now = 4
    assert not rig.boundary().failed
    rig.clock.now = 6
    report = rig.boundary()
    assert report.failed[0][0] == 0 and "late" in report.failed[0][1]
    assert rig.pager.staged_pages == staged and rig.allocator.free_pages == 40
    rig.check()


def test_cancel_promotions_returns_reservations_and_keeps_demotions():
    rig = Rig(3, spare=20, fate=lambda job: Fate("ok", 2), staging=32)
    free = rig.allocator.free_pages
    rig.pager.request(plan(b0=4, b1=2, b2=16, b4=4, b6=16))
    rig.boundary()
    reserved = free - rig.allocator.free_pages
    assert reserved > 0 and rig.pager.cancel_promotions() == reserved and rig.allocator.free_pages == free
    assert rig.pager.staged_pages > 0  # the cancelled copies still run
    rig.check()
    rig.settle()
    np.testing.assert_array_equal(rig.pager.committed, plan(b1=2))
    assert rig.pager.counters.promotions == 0


def test_a_cancelled_copy_counts_as_staged_until_it_ends():
    rig = Rig(3, spare=40, staging=4, fate=lambda job: Fate("ok", 3))
    rig.pager.request(plan(b0=4))
    rig.boundary()
    rig.pager.cancel_promotions()
    rig.pager.request(plan(b1=2))
    assert not rig.boundary().started
    rig.settle()
    rig.check()

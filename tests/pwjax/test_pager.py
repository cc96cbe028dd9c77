"""The pager under any order of plans, KV growth and broken copies: the tables always point at the right content."""

import gc
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.pages import BlockShape, Geometry
from pwjax.memory.allocator import PageAllocator, PageError
from pwjax.memory.arena import Arena, padded_pages
from pwjax.memory.faults import FakeStore, Fate, FaultyTransfer
from pwjax.memory.kv import KVKind, KVPages
from pwjax.memory.moves import TRANSITIONS, MoveState, largest_demotion_pages, make_move, move_shape
from pwjax.memory.pacing import Pace
from pwjax.memory.page_table import PageTableState
from pwjax.memory.pager import Pager
from pwjax.memory.report import Outcome
from pwjax.memory.transfer import SyncTransfer, ThreadTransfer, TransferError, TransferJob, stage

GEOMETRY = Geometry(64, (2, 3, 4), True, BlockShape(32, 64, 4), BlockShape(32, 96, 4))
LAYERS, EXPERTS, BLOCKS = 2, 2, 8
WIDTHS = (4, 16)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Rig:
    """A pager over a fake store; ``fate`` decides what becomes of each copy once the first load is done."""

    def __init__(self, bits=3, *, fate=None, spare=0, staging=32, transfer=None, pages=None, **options):
        bits = np.broadcast_to(bits, BLOCKS)
        need = sum(GEOMETRY.block_pages(b % 2, int(bits[b])) for b in range(BLOCKS))
        self.store, self.clock, self.fate = FakeStore(64), Clock(), fate
        self.loaded = False
        self.transfer = transfer or FaultyTransfer(self.store, self._fate)
        # One arena size for all tests, so that programs compile once; a filler leaves exactly ``spare`` free.
        self.allocator = PageAllocator(300)
        self.filler = 299 - (pages or need + spare)
        self.allocator.alloc(self.filler, ("filler", 0))
        self.arena = Arena(self.allocator.num_pages, 64, WIDTHS)
        self.table = PageTableState(LAYERS, EXPERTS, GEOMETRY)
        self.pager = Pager(
            self.arena,
            self.allocator,
            self.table,
            GEOMETRY,
            self.transfer,
            clock=self.clock,
            staging_pages=staging,
            **options,
        )
        self.pager.load_initial(bits)
        self.loaded = True
        self.index = 0

    def _fate(self, job):
        return self.fate(job) if self.loaded and self.fate else Fate()

    def boundary(self, outcome=None):
        before, epoch = self.pager.committed, self.table.epoch
        report = self.pager.boundary(self.index, outcome)
        self.index += 1
        changed = np.flatnonzero(before != self.pager.committed).tolist()
        assert sorted(c.block for c in report.committed) == changed
        assert report.epoch == self.table.epoch == epoch + bool(changed)
        return report

    def settle(self, limit=200):
        reports = []
        while not self.pager.idle:
            reports.append(self.boundary())
            assert len(reports) < limit
        return reports

    def check(self):
        """Invariants, and every slot of the device table shows the page of the host that it should."""
        self.pager.check_invariants()
        bits, pages = (np.array(jax.numpy.copy(x)) for x in (self.table.table.bits, self.table.table.pages))
        np.testing.assert_array_equal(bits.reshape(-1), self.pager.committed)
        for block in range(BLOCKS):
            layer, expert, matrix = self.table.locate(block)
            width = int(bits[layer, expert, matrix])
            ids = pages[layer, expert, matrix][list(GEOMETRY.table_slots(matrix, width))]
            host = GEOMETRY.host_block_start(expert, matrix) + np.array(GEOMETRY.host_pages(matrix, width))
            words = self.arena.read_pages(np.resize(ids, GEOMETRY.slots))[: len(ids)]
            np.testing.assert_array_equal(words, self.store.read(layer, host))


def plan(**bits):
    """Plan of 3 bits everywhere but ``b<block>=bits``."""
    target = np.full(BLOCKS, 3)
    for name, value in bits.items():
        target[int(name[1:])] = value
    return target


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
        Arena(200, 64, WIDTHS),
        PageAllocator(200),
        PageTableState(LAYERS, EXPERTS, GEOMETRY),
        GEOMETRY,
        SyncTransfer(rig.store),
        staging_pages=staging,
    )
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


@pytest.mark.parametrize("from_bits", [3, 4, 16])
@pytest.mark.parametrize("to_bits", [2, 3])
def test_demotion_needs_no_free_page(from_bits, to_bits):
    if to_bits >= from_bits:
        return
    rig = Rig(from_bits)
    assert rig.allocator.free_pages == 0
    want = sum(GEOMETRY.block_pages(b % 2, from_bits) - GEOMETRY.block_pages(b % 2, to_bits) for b in range(BLOCKS))
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


def test_staging_that_holds_the_largest_demotion_makes_every_demotion_free():
    part = largest_demotion_pages(GEOMETRY)
    for matrix in (0, 1):
        for high in GEOMETRY.all_bits:
            for low in (b for b in GEOMETRY.all_bits if b < high):
                assert move_shape(GEOMETRY, matrix, high, low, part).reserve == 0
    assert any(move_shape(GEOMETRY, m, 16, 4, part - 1).reserve for m in (0, 1))


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


def test_staging_through_pinned_memory_gives_the_same_words():
    device = jax.devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        pytest.skip("this backend has no pinned memory")
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    job = TransferJob(0, 1, (1, 2, 3, 9, 8), WIDTHS)
    straight, through = (stage(FakeStore(64), job, way) for way in (None, pinned))
    for a, b in zip(straight.words, through.words, strict=True):
        np.testing.assert_array_equal(a, b)
        assert b.sharding.memory_kind == "device" or b.sharding.memory_kind == a.sharding.memory_kind


def test_threads_end_where_synchronous_copies_end():
    store, threads = FakeStore(64), set()
    read = store.read

    def recorded(layer, pages):
        threads.add(threading.current_thread().name)
        return read(layer, pages)

    store.read = recorded
    transfer = ThreadTransfer(store, workers=2)
    rig, same = Rig(3, spare=40, transfer=transfer), Rig(3, spare=40, transfer=SyncTransfer(FakeStore(64)))
    target = np.array([2, 2, 4, 16, 4, 3, 2, 3])
    for r in (rig, same):
        r.pager.request(target)
        r.settle(limit=100_000)
        r.check()
    np.testing.assert_array_equal(rig.pager.committed, same.pager.committed)
    assert all(name.startswith("pwjax-transfer") for name in threads)
    transfer.close()


def test_thread_transfer_passes_errors_and_cancels():
    gate = threading.Event()

    class Slow(FakeStore):
        def read(self, layer, pages):
            gate.wait(10)
            if layer == 1:
                raise OSError("checksum of page 3")
            return super().read(layer, pages)

    transfer = ThreadTransfer(Slow(64), workers=1)
    jobs = [TransferJob(0, layer, (1, 2, 3, 4, 5), WIDTHS) for layer in (0, 1, 0)]
    first, second, third = map(transfer.submit, jobs)
    third.cancel()
    assert not first.done() and third.done()
    gate.set()
    staged = first.result()
    assert staged.pages == 5 and [w.shape[0] for w in staged.words] == list(jobs[0].chunks) == [4, 4]
    with pytest.raises(OSError, match="page 3"):
        second.result()
    with pytest.raises(TransferError, match="cancelled"):
        third.result()
    transfer.close()


def test_staged_words_do_not_alias_what_the_store_returned():
    """A store may reuse its buffer, also a 64-byte aligned one that device_put would alias."""
    raw = np.zeros(4 * 64 + 16, np.uint32)
    offset = -raw.ctypes.data % 64 // 4
    aligned = raw[offset : offset + 4 * 64].reshape(4, 64)

    class Reusing(FakeStore):
        def read(self, layer, pages):
            aligned[:] = layer + 1
            return aligned

    transfer = SyncTransfer(Reusing(64))
    staged = transfer.submit(TransferJob(0, 0, (0, 1, 2, 3), WIDTHS)).result()
    transfer.submit(TransferJob(0, 7, (0, 1, 2, 3), WIDTHS))
    assert np.array(staged.words[0]).max() == 1


def test_replay_repeats_the_epochs_of_a_logged_run():
    rng = np.random.default_rng(0)
    kinds = ["ok", "ok", "ok", "fail"]
    logged = Rig(3, spare=30, staging=12, fate=lambda job: Fate(rng.choice(kinds), int(rng.integers(4))))
    plans = [rng.choice(GEOMETRY.all_bits, BLOCKS) for _ in range(6)]

    def drive(rig, outcomes):
        trace = []
        for i in range(40):
            if i % 7 == 0:
                rig.pager.request(plans[i // 7])
            if i == 16:
                rig.pager.cancel_promotions()
            report = rig.boundary(outcomes[i] if outcomes else None)
            trace.append((report, rig.table.pages.copy()))
        return trace

    first = drive(logged, None)
    assert any(r.failed for r, _ in first) and sum(len(r.committed) for r, _ in first) > 5
    replay = Rig(3, spare=30, staging=12, fate=lambda job: Fate("ok", 2))
    second = drive(replay, [r.outcome for r, _ in first])
    for (a, pages), (b, again) in zip(first, second, strict=True):
        assert a.outcome == b.outcome and a.committed == b.committed and a.epoch == b.epoch
        np.testing.assert_array_equal(pages, again)
    with pytest.raises(PageError, match="not in flight"):
        replay.boundary(Outcome(landed=(99,)))


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


ACTIONS = st.one_of(
    st.tuples(st.just("plan"), st.lists(st.sampled_from(GEOMETRY.all_bits), min_size=BLOCKS, max_size=BLOCKS)),
    st.tuples(st.just("grow"), st.tuples(st.integers(0, 1), st.integers(0, 20))),
    st.tuples(st.just("release"), st.integers(0, 1)),
    st.tuples(st.just("cancel"), st.none()),
    st.tuples(st.just("tick"), st.integers(1, 8)),
    st.tuples(st.just("boundary"), st.none()),
)
FATES = st.builds(
    Fate, st.sampled_from(["ok", "ok", "ok", "fail", "short", "narrow"]), st.sampled_from([0, 0, 1, 3, None])
)


@settings(deadline=None, max_examples=60)
@given(
    start=st.lists(st.sampled_from((2, 3, 4, 16)), min_size=BLOCKS, max_size=BLOCKS),
    spare=st.integers(0, 60),
    staging=st.sampled_from([4, 9, 24, 64]),
    actions=st.lists(ACTIONS, min_size=4, max_size=25),
    fates=st.lists(FATES, min_size=1, max_size=12),
)
def test_any_run_keeps_every_promise(start, spare, staging, actions, fates):
    count = iter(range(1_000_000))
    rig = Rig(start, spare=spare, staging=staging, late_s=10, fate=lambda job: fates[next(count) % len(fates)])
    kv = KVPages(rig.allocator, [KVKind(LAYERS, 16, 64, 20)], slots=2)
    rows = np.full((2 * 2 * 20, 16), 0xFFFFFFFF, np.uint32)
    for kind, value in actions:
        if kind == "plan":
            rig.pager.request(np.array(value))
        elif kind == "grow":
            slot, tokens = value
            if kv.reserve(slot, tokens) and tokens:
                # KV writes over whatever the page held before: a retired page in use would show at once.
                [place] = kv.places(slot, 0, tokens, 20)
                rig.arena.commit_kv(*place, jax.numpy.asarray(rows))
        elif kind == "release":
            kv.release(value)
        elif kind == "cancel":
            rig.pager.cancel_promotions()
        elif kind == "tick":
            rig.clock.now += value
        expected = rig.allocator.free_pages + rig.pager.releasing_pages - rig.pager.reserving_pages
        final = sum(GEOMETRY.block_pages(b % 2, int(rig.pager.desired[b])) for b in range(BLOCKS))
        assert expected == rig.allocator.capacity_pages - rig.filler - kv.used_pages - final
        rig.boundary()
        rig.check()
        kv.check_invariants()
        assert rig.pager.counters.staging_peak_pages <= staging
    kv.apply()
    rig.pager.close()
    rig.check()
    committed = sum(GEOMETRY.block_pages(b % 2, int(rig.pager.committed[b])) for b in range(BLOCKS))
    assert rig.allocator.used_pages == rig.filler + committed + kv.used_pages


@settings(deadline=None, max_examples=30)
@given(
    start=st.lists(st.sampled_from((3, 4, 16)), min_size=BLOCKS, max_size=BLOCKS),
    target=st.lists(st.sampled_from((2, 3)), min_size=BLOCKS, max_size=BLOCKS),
    delays=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_any_demotion_at_zero_free_pages_lands(start, target, delays):
    count = iter(range(1_000_000))
    rig = Rig(start, fate=lambda job: Fate("ok", delays[next(count) % len(delays)]))
    assert rig.allocator.free_pages == 0
    target = np.minimum(start, target)
    rig.pager.request(target)
    while not rig.pager.idle:
        assert rig.boundary().blocked_pages == 0
        rig.check()
    np.testing.assert_array_equal(rig.pager.committed, target)

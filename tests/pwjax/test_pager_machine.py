"""Arena bookkeeping, page table, KV pages and pager together, under any order of requests, plans, faults and finishes.

The arena is a NumPy array, so that a step costs nothing. A page's words say which host page (or which token of which
slot) they are; after every step each table must show exactly the content it should.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from pager_rig import BLOCKS, EXPERTS, GEOMETRY, LAYERS, WIDTHS, Clock, block_pages, stored_words

from pwjax.memory.allocator import PageAllocator
from pwjax.memory.faults import FakeStore
from pwjax.memory.kv import KVKind, KVPages
from pwjax.memory.moves import largest_demotion_pages
from pwjax.memory.pacing import Pace
from pwjax.memory.page_table import PageTableState
from pwjax.memory.pager import Pager
from pwjax.memory.transfer import StagedPages, TransferError

WORDS = GEOMETRY.page_words
SLOTS, CONTEXT, ROW_WORDS = 3, 40, 16
STAGING = 16


class HostArena:
    """Stands in for the device array; refuses what a real one refuses."""

    page_widths, page_words = WIDTHS, WORDS

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.words = np.zeros((num_pages, WORDS), np.uint32)

    def commit_pages(self, ids, words):
        assert words.shape[0] in WIDTHS and len(ids) <= words.shape[0] and len(set(ids.tolist())) == len(ids)
        assert min(ids, default=1) >= 1
        self.words[ids] = words[: len(ids)]

    def wait(self):
        pass


class Copy:
    """A copy that ends after ``polls`` looks, well or badly; once cancelled, only its end is waited for."""

    def __init__(self, store, job, kind, polls):
        self.store, self.job, self.kind, self.polls = store, job, kind, polls

    def done(self):
        self.polls -= 1
        return self.polls < 0

    def result(self):
        self.polls = -1
        if self.kind == "fail":
            raise TransferError("made to fail")
        rows = self.store.read(self.job.layer, self.job.pages)
        words = [np.resize(rows, (width, WORDS)) for width in self.job.chunks]
        start = 0
        for chunk in words:
            part = rows[start : start + len(chunk)]
            chunk[: len(part)] = part
            start += len(chunk)
        if self.kind == "narrow":
            words.pop()
        return StagedPages(tuple(words), len(rows) - (self.kind == "short"))

    def cancel(self):
        pass


class Copies:
    def __init__(self, store):
        self.store, self.fates = store, []

    def submit(self, job):
        kind, polls = self.fates.pop() if self.fates else ("ok", 0)
        return Copy(self.store, job, kind, polls)


FATE = st.tuples(st.sampled_from(["ok", "ok", "fail", "short", "narrow"]), st.integers(0, 4))


class Memory(RuleBasedStateMachine):
    """One device's memory, driven by anything; ``steps`` counts over all examples."""

    steps = 0

    def __init__(self):
        super().__init__()
        low = block_pages([2] * BLOCKS)
        self.allocator = PageAllocator(1 + low + 70)
        self.arena, self.store = HostArena(self.allocator.num_pages), FakeStore(WORDS)
        self.copies, self.clock, self.index = Copies(self.store), Clock(), 0
        self.table = PageTableState(LAYERS, EXPERTS, GEOMETRY)
        self.pager = Pager(
            self.arena, self.allocator, self.table, GEOMETRY, self.copies, clock=self.clock, staging_pages=STAGING,
            late_s=10.0, tries=3, pace=Pace(self.clock),
        )  # fmt: skip
        self.pager.load_initial(np.full(BLOCKS, 2))
        kinds = [KVKind(1, ROW_WORDS, WORDS, CONTEXT, window=6), KVKind(1, ROW_WORDS, WORDS, CONTEXT)]
        self.kv = KVPages(self.allocator, kinds, SLOTS)
        self.tokens = [0] * SLOTS

    @rule(bits=st.lists(st.sampled_from(GEOMETRY.all_bits), min_size=BLOCKS, max_size=BLOCKS))
    def plan(self, bits):
        self.pager.request(np.array(bits))

    @rule(block=st.integers(0, BLOCKS - 1), bits=st.sampled_from(GEOMETRY.all_bits))
    def plan_one(self, block, bits):
        wanted = self.pager.desired.copy()
        wanted[block] = bits
        self.pager.request(wanted, [block])

    @rule(slot=st.integers(0, SLOTS - 1), more=st.integers(1, 12))
    def grow(self, slot, more):
        tokens = min(CONTEXT, self.tokens[slot] + more)
        free = self.allocator.free_pages
        need = self.kv.pages_needed(slot, tokens)
        assert self.kv.reserve(slot, tokens) == (need <= free)
        assert self.allocator.free_pages == (free - need if need <= free else free)
        if need <= free:
            # KV writes over whatever the pages held: a retired page in use would show at once.
            held = np.concatenate([pages[slot].reshape(-1) for pages in self.kv.pages])
            self.arena.words[held[held > 0]] = 0xFFFFFFFF
            self.tokens[slot] = tokens

    @rule(slot=st.integers(0, SLOTS - 1))
    def finish(self, slot):
        held = self.kv.slot_pages(slot)
        free = self.allocator.free_pages
        self.kv.release(slot)
        assert self.allocator.free_pages == free + held
        self.tokens[slot] = 0

    @rule(fates=st.lists(FATE, min_size=1, max_size=6))
    def faults(self, fates):
        self.copies.fates = list(fates)

    @rule(seconds=st.sampled_from([0.001, 0.1, 4.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule()
    def stop_promotions(self):
        free, bits = self.allocator.free_pages, self.pager.committed
        back = self.pager.cancel_promotions()
        assert self.allocator.free_pages == free + back and np.all(self.pager.desired <= bits)

    @rule()
    def stop_demotions(self):
        free, bits = self.allocator.free_pages, self.pager.committed
        back = self.pager.cancel_demotions()
        assert self.allocator.free_pages == free + back and np.all(self.pager.desired >= bits)
        assert not self.pager.demoting

    @rule(urgent=st.booleans(), idle=st.booleans(), takes_s=st.sampled_from([0.0, 0.0, 0.05]))
    def boundary(self, urgent, idle, takes_s):
        before, epoch = self.pager.committed, self.table.epoch
        expected = self.allocator.free_pages + self.pager.releasing_pages - self.pager.reserving_pages
        final = block_pages(self.pager.desired)
        assert expected == self.allocator.capacity_pages - self.kv.used_pages - final
        commit, self.arena.commit_pages = self.arena.commit_pages, self.slow(takes_s)
        report = self.pager.boundary(self.index, urgent=urgent, idle=idle)
        self.arena.commit_pages = commit
        self.index += 1
        changed = np.flatnonzero(before != self.pager.committed).tolist()
        assert sorted(c.block for c in report.committed) == changed and self.table.epoch == epoch + bool(changed)

    @precondition(lambda self: not self.pager.given_up.any())
    @rule()
    def quiet(self):
        """Without faults and new wishes, everything under way comes to its end, or waits for free pages."""
        self.copies.fates = []
        for _ in range(200):
            if self.pager.idle:
                return
            report = self.pager.boundary(self.index, idle=True)
            self.index += 1
            if report.blocked_pages and not self.pager.moving.any():
                return
        raise AssertionError("the pager never came to rest")

    def slow(self, takes_s):
        def commit(ids, words):
            self.clock.now += takes_s
            HostArena.commit_pages(self.arena, ids, words)

        return commit

    @invariant()
    def everything_holds(self):
        Memory.steps += 1
        self.pager.check_invariants()
        self.kv.check_invariants()
        assert self.pager.counters.staging_peak_pages <= STAGING
        assert not self.arena.words[0].any()
        for block in range(BLOCKS):
            words = self.arena.words[self.table.block_pages(block)]
            np.testing.assert_array_equal(words, stored_words(self.store, self.table, block))

    @invariant()
    def a_demotion_never_waits_for_pages(self):
        assert largest_demotion_pages(GEOMETRY) <= STAGING
        down = self.pager.desired < self.pager.committed
        assert all(self.pager._shape(int(b)).reserve == 0 for b in np.flatnonzero(down & ~self.pager.moving))

    def teardown(self):
        for slot in range(SLOTS):
            self.kv.release(slot)
        self.pager.close()
        self.pager.check_invariants()
        resident = block_pages(self.table.block_bits(b) for b in range(BLOCKS))
        assert self.allocator.used_pages == resident


def run(examples, steps):
    Memory.steps = 0
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=health)
    run_state_machine_as_test(Memory, settings=options)
    return Memory.steps


def test_any_order_keeps_every_promise():
    assert run(12, 40) >= 200


@pytest.mark.slow
def test_any_order_keeps_every_promise_for_twenty_thousand_steps():
    assert run(600, 50) >= 20_000

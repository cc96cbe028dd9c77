"""The pager under any order of plans, KV growth and broken copies: the tables always point at the right content."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pager_rig import BLOCKS, GEOMETRY, LAYERS, Rig, block_pages

from pwjax.memory.allocator import PageError
from pwjax.memory.faults import Fate
from pwjax.memory.kv import KVKind, KVPages
from pwjax.memory.report import Outcome


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
        final = block_pages(rig.pager.desired)
        assert expected == rig.allocator.capacity_pages - rig.filler - kv.used_pages - final
        rig.boundary()
        rig.check()
        kv.check_invariants()
        assert rig.pager.counters.staging_peak_pages <= staging
    kv.apply()
    rig.pager.close()
    rig.check()
    committed = block_pages(rig.pager.committed)
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

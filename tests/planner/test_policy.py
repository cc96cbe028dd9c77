"""Policies in a small simulated arena: moves land late, KV comes and goes."""

from itertools import cycle, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import POLICIES, Observation, PlanStatus, Thresholds, get_policy

DYNAMIC = ("default", "uniform-dynamic")


class Arena:
    """``capacity`` pages that blocks and KV share; a move lands ``latency`` boundaries after its plan."""

    def __init__(self, table, policy, capacity, reserve, latency=2):
        self.table, self.policy, self.capacity, self.latency = table, policy, capacity, latency
        plan = policy.initial(table, capacity, reserve)
        self.bits, self.moving = plan.bits.copy(), np.zeros(table.blocks, bool)
        self.landing, self.kv, self.boundary, self.log = [], 0, 0, []

    def _in_flight(self, sign):
        return sum(max(0, sign * change.pages) for _, change in self.landing)

    @property
    def free(self):
        """Free pages; promotions in flight hold theirs already."""
        return self.capacity - self.kv - self.table.total_pages(self.bits) - self._in_flight(1)

    def step(self, kv_wanted):
        """One boundary: land moves, let KV take what is free, ask the policy."""
        for _, change in (m for m in self.landing if m[0] == self.boundary):
            self.bits[change.block], self.moving[change.block] = change.to_bits, False
        self.landing = [m for m in self.landing if m[0] > self.boundary]
        self.kv = min(kv_wanted, self.kv + self.free)
        seen = Observation(
            self.bits.copy(),
            self.moving.copy(),
            self.free,
            growth_pages=0,
            boundary=self.boundary,
            blocked_pages=kv_wanted - self.kv,
            releasing_pages=self._in_flight(-1),
        )
        plan = self.policy.step(seen)
        for change in plan.changes() if plan else []:
            assert not self.moving[change.block], "a block in flight was planned again"
            self.moving[change.block] = True
            self.landing.append((self.boundary + self.latency, change))
            self.log.append((self.boundary, change))
        assert self.free >= 0
        self.boundary += 1
        return plan


@pytest.fixture
def table(make_table):
    return make_table(seed=3, layers=2, experts=8)


def arena(table, name="default", latency=2, **options):
    capacity = table.total_pages(5)
    return Arena(table, get_policy(name, **options), capacity, reserve=capacity // 10, latency=latency)


@pytest.mark.parametrize("name", DYNAMIC)
def test_weights_give_way_to_kv_and_come_back(table, name):
    a = arena(table, name)
    start = table.mean_bits(a.bits)
    for kv in range(0, 150, 3):
        a.step(kv)
    low = table.mean_bits(a.bits)
    assert a.kv >= 140 and low < start
    for _ in range(100):
        a.step(0)
    assert table.mean_bits(a.bits) >= start


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(DYNAMIC),
    pattern=st.lists(st.integers(0, 350), min_size=1, max_size=40),
    latency=st.integers(1, 6),
)
def test_no_trace_makes_it_thrash(make_table, name, pattern, latency):
    table = make_table(seed=3, layers=2, experts=8)
    residence, length = 10, 80
    a = arena(table, name, latency, residence=residence)
    for kv in islice(cycle(pattern), length):
        a.step(kv)
    for block in range(table.blocks):
        ups = [at for at, change in a.log if change.block == block and change.pages > 0]
        assert all(later - earlier >= residence for earlier, later in pairwise(ups))


@pytest.mark.parametrize("name", DYNAMIC)
def test_fast_alternation_settles(table, name):
    a = arena(table, name, residence=10)
    for kv in islice(cycle([0, 0, 0, 160, 160, 160]), 120):
        a.step(kv)
    late = [change for at, change in a.log if at > 30]
    assert late == [], "the swing is faster than the residence: weights must stay low"


def test_moves_in_flight_count_as_released(table):
    a = arena(table, latency=5)
    first = a.step(100)
    assert first.released_pages > 0
    for _ in range(4):
        assert a.step(100) is None
    assert a.step(100) is None and a.kv == 100


def test_spare_pages_must_last_before_they_are_spent(table):
    policy = get_policy("default", residence=8)
    bits = policy.initial(table, table.total_pages(5), 0).bits
    still = np.zeros(table.blocks, bool)
    plans = [policy.step(Observation(bits, still, 200, 0, boundary)) for boundary in range(9)]
    assert plans[:8] == [None] * 8 and plans[8].moves
    for boundary in range(9, 30):
        free = 0 if boundary == 12 else 200
        plan = policy.step(Observation(bits, still, free, 0, boundary))
        assert (plan is None) == (12 < boundary <= 20), boundary


def test_a_plan_leaves_blocks_in_flight_alone(table):
    policy = get_policy("default", residence=0)
    bits = policy.initial(table, table.total_pages(5), 0).bits
    moving = np.arange(table.blocks) % 2 == 0
    for free, growth in ((0, 100), (400, 0)):
        plan = policy.step(Observation(bits, moving, free, growth, boundary=free))
        assert plan.moves and not any(moving[c.block] for c in plan.changes())


@pytest.mark.parametrize("name", DYNAMIC)
def test_pressure_beyond_the_lowest_width_says_unmet(table, name):
    policy = get_policy(name)
    policy.initial(table, table.total_pages(5), 0)
    lowest = np.full(table.blocks, 2)
    plan = policy.step(Observation(lowest, np.zeros(table.blocks, bool), 0, 50, boundary=1))
    assert plan.status is PlanStatus.UNMET and not plan.moves
    assert "release" in plan.cause


def test_floors_hold_until_they_must_not(table):
    a = arena(table)
    seen = [plan.stage for kv in range(0, 500, 5) if (plan := a.step(kv))]
    assert seen[0] == 0 and seen == sorted(seen) and seen[-1] == 2


def test_one_plan_promotes_no_more_than_the_ceiling(table):
    policy = get_policy("default", ceiling=0.01, residence=0)
    policy.initial(table, table.total_pages(6), 0)
    bits = np.full(table.blocks, 2)
    plan = policy.step(Observation(bits, np.zeros(table.blocks, bool), 200, 0, boundary=1))
    assert 0 < -plan.released_pages <= table.pages.max()


def test_initial_plans_leave_the_reserve(table):
    capacity = table.total_pages(5)
    for name in POLICIES:
        plan = get_policy(name).initial(table, capacity, capacity // 5)
        assert plan.met and plan.pages_after <= capacity - capacity // 5, name
        assert not get_policy(name).initial(table, table.total_pages(2), 1).met, name


def test_fixed_policies_never_move(table):
    for name in ("static", "uniform"):
        policy = get_policy(name)
        bits = policy.initial(table, table.total_pages(5), 10).bits
        assert policy.step(Observation(bits, np.zeros(table.blocks, bool), 0, 100, boundary=1)) is None


def test_uniform_widths(table):
    assert (get_policy("uniform", bits=3).initial(table, 10**6, 0).bits == 3).all()
    assert (get_policy("uniform").initial(table, table.total_pages(4) + 5, 5).bits == 4).all()
    with pytest.raises(ValueError, match="7 bits are not in this table"):
        get_policy("uniform", bits=7).initial(table, 10**6, 0)


def test_uniform_dynamic_moves_all_blocks_together(table):
    a = arena(table, "uniform-dynamic")
    for kv in [*range(0, 200, 4), *[0] * 60]:
        a.step(kv)
        if not a.moving.any():
            assert len(set(a.bits.tolist())) == 1
    assert {change.to_bits for _, change in a.log} >= {3, 4}


def test_uniform_dynamic_evens_out_after_a_failed_move(table):
    policy = get_policy("uniform-dynamic", residence=0)
    policy.initial(table, table.total_pages(5), 0)
    bits = np.where(np.arange(table.blocks) == 4, 5, 4)
    still = np.zeros(table.blocks, bool)
    assert (policy.step(Observation(bits, still, 0, 0, boundary=1)).bits <= 4).all()
    assert (policy.step(Observation(bits, still, 999, 0, boundary=99)).bits == 5).all()


def test_unknown_names_and_options_are_explained():
    with pytest.raises(ValueError, match="unknown policy 'papr'; choose from default, static, uniform"):
        get_policy("papr")
    with pytest.raises(ValueError, match="'static' has no option bits; it takes no options"):
        get_policy("static", bits=3)
    assert get_policy("default", thresholds=Thresholds(0.1, 0.2, 0.3)).thresholds.settle_at == 0.2

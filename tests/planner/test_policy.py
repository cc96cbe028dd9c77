"""Policies in a small simulated arena: moves land late, KV comes and goes."""

from dataclasses import replace
from itertools import cycle, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import POLICIES, Observation, PlanStatus, ResidualHeads, Thresholds, get_policy, price

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


@pytest.mark.parametrize("name", (*DYNAMIC, "paper", "hotness", "random"))
def test_weights_give_way_to_kv_and_come_back(table, name):
    a = arena(table, name)
    start, held = table.mean_bits(a.bits), table.total_pages(a.bits)
    for kv in range(0, 150, 3):
        a.step(kv)
    low = table.mean_bits(a.bits)
    assert a.kv >= 140 and low < start
    for _ in range(100):
        a.step(0)
    # Thresholds may leave a little more free than the reserve was.
    assert table.total_pages(a.bits) >= held - table.pages.max() and table.mean_bits(a.bits) > low


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
        growth = 201 if boundary == 12 else 0
        plan = policy.step(Observation(bits, still, 200, growth, boundary))
        assert (plan is None) == (12 < boundary <= 20), boundary


def test_a_plan_leaves_blocks_in_flight_alone(table):
    policy = get_policy("default", residence=0)
    bits = policy.initial(table, table.total_pages(5), 0).bits
    moving = np.arange(table.blocks) % 2 == 0
    for free, growth in ((0, 100), (400, 0)):
        plan = policy.step(Observation(bits, moving, free, growth, boundary=free))
        assert plan.moves and not any(moving[c.block] for c in plan.changes())


@pytest.mark.parametrize("name", (*DYNAMIC, "paper"))
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
    assert (policy.step(Observation(bits, still, 0, 1, boundary=1)).bits <= 4).all()
    assert (policy.step(Observation(bits, still, 999, 0, boundary=99)).bits == 5).all()


def test_blocks_given_up_do_not_hold_the_others_down(table):
    policy = get_policy("uniform-dynamic", residence=0)
    policy.initial(table, table.total_pages(5), 0)
    given_up = np.arange(table.blocks) == 4
    bits = np.where(given_up, 2, 4)
    plan = policy.step(Observation(bits, given_up, 999, 0, boundary=1, given_up=given_up))
    assert (plan.bits[~given_up] == 5).all() and plan.bits[4] == 2
    assert policy.step(Observation(bits, given_up, 999, 0, boundary=2)) is None, "one that still moves is waited for"


def test_of_tiny_blocks_16_bits_can_be_the_smaller(table):
    pages = np.tile([1, 2, 3, 5, 9, 4], (table.blocks, 1))
    tiny = replace(table, pages=pages)
    assert (get_policy("uniform").initial(tiny, 4 * table.blocks, 0).bits == 16).all()
    assert not get_policy("uniform").initial(tiny, 1, 0).met
    policy = get_policy("uniform-dynamic", residence=0)
    policy.initial(tiny, 6 * table.blocks, 0)
    still = np.zeros(table.blocks, bool)
    up = policy.step(Observation(np.full(table.blocks, 4), still, 3 * table.blocks, 0, boundary=1))
    assert (up.bits == 16).all()
    down = policy.step(Observation(np.full(table.blocks, 16), still, 0, 9 * table.blocks, boundary=2))
    assert (down.bits == 2).all() and down.status is PlanStatus.UNMET


def test_served_tokens_earn_the_right_to_promote(table):
    policy = get_policy("default", residence=0, ceiling=0.5, token_ceiling=0.01)
    capacity = policy.initial(table, table.total_pages(6), 0).pages_after
    bits, still = np.full(table.blocks, 2), np.zeros(table.blocks, bool)

    def promoted(boundary, tokens):
        plan = policy.step(Observation(bits, still, capacity, 0, boundary, tokens=tokens))
        return -plan.released_pages if plan else 0

    first = promoted(1, 0)
    assert 0 < first <= capacity // 2
    assert promoted(2, 0) <= capacity // 2 - first + 1
    before = promoted(3, 0)
    assert before <= promoted(4, 10) <= before + 0.1 * capacity + table.pages.max()


def test_requests_set_a_floor_and_a_limit_of_damage(table):
    for name in (*DYNAMIC, "paper"):
        policy = get_policy(name)
        policy.initial(table, table.total_pages(5), 0)
        bits, still = np.full(table.blocks, 5), np.zeros(table.blocks, bool)
        plan = policy.step(Observation(bits, still, 0, 999, boundary=1, floor_bits=4))
        assert plan.bits.min() == 4 and plan.status is PlanStatus.UNMET, name
    policy = get_policy("default")
    policy.initial(table, table.total_pages(5), 0)
    limit = table.total_damage(5) * 1.5
    plan = policy.step(Observation(bits, still, 0, 999, boundary=1, max_damage=limit))
    assert plan.moves and plan.damage <= limit and plan.status is PlanStatus.UNMET


def test_each_layer_of_the_default_can_be_taken_away(table):
    still, bits = np.zeros(table.blocks, bool), np.full(table.blocks, 5)
    choices = np.roll(table.routing_mass, 3, axis=1)
    heads = ResidualHeads(np.full((2, 5, 4), 1.0), np.ones((2, 5)), np.full((2, 5), -2), np.full((2, 5), 2))
    hurt = np.zeros((table.blocks, 4))
    hurt[::3] = 0.5
    table = replace(table, heads=heads)

    def bits_of(name):
        policy = get_policy(name)
        policy.initial(table, table.total_pages(5), 0)
        seen = Observation(bits, still, 0, 60, 1, routing_choices=choices, residual=hurt)
        plan = policy.step(seen)
        return tuple(plan.bits.tolist()) if plan else tuple(bits.tolist())

    names = ["default", *(f"default:{layer}=off" for layer in ("routing", "residual", "sensitivity", "movement"))]
    plans = [bits_of(name) for name in (*names, "hotness", "random", "random:seed=1")]
    assert len(set(plans)) == len(plans)
    assert not get_policy("default:movement=off").moves and get_policy("default").moves


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", ""])
@pytest.mark.parametrize("option", ["default:strength", "paper:epsilon", "paper:depth", "random:seed"])
def test_numbers_that_no_option_means_are_refused(option, value):
    with pytest.raises(ValueError, match="must be a (whole )?number from 0, got"):
        get_policy(f"{option}={value}")


def test_unknown_names_and_options_are_explained():
    with pytest.raises(ValueError, match="unknown policy 'papr'; choose from default, paper, static, uniform"):
        get_policy("papr")
    with pytest.raises(ValueError, match="'static' has no option bits; it takes no options"):
        get_policy("static", bits=3)
    with pytest.raises(ValueError, match="option routing must be on or off, got 'no'"):
        get_policy("default:routing=no")
    with pytest.raises(ValueError, match="option residence must be a whole number from 0, got '1.5'"):
        get_policy("default:residence=1.5")
    with pytest.raises(ValueError, match="option floors must be set from Python"):
        get_policy("default:floors=1")
    with pytest.raises(ValueError, match="option quantiles must be set from Python, got '0.5'"):
        get_policy("paper:quantiles=0.5")
    with pytest.raises(ValueError, match="no option speed; it takes thresholds"):
        get_policy("default:speed=1")
    assert get_policy("default:residence=3,ceiling=0.5,depth=2").depth == 2
    assert get_policy("default", thresholds=Thresholds(0.1, 0.2, 0.3)).thresholds.settle_at == 0.2


def test_few_tokens_say_little_about_routing(table):
    mass = np.zeros((2, 8))
    mass[:, 1] = 1
    none, some, all_of_it = (price(table, mass, tokens).damage for tokens in (0, 100, None))
    assert np.allclose(none, table.expected)
    hot = table.expected[2, 0]
    assert hot < some[2, 0] < all_of_it[2, 0]

"""The paper's policy: its equations, and Algorithm 1 around them."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Observation, PlanStatus, ResidualHeads, get_policy
from planner.paper import order
from planner.tables import BlockTable


def greedy(damage, pages, start):
    """Algorithm 1's greedy, one action at a time."""

    def push(block, level):
        for to in range(level - 1, -1, -1):
            released = int(pages[block, level] - pages[block, to])
            if released > 0:
                cost = damage[block, to] - damage[block, level]
                heapq.heappush(heap, (cost / released, block, -to, released, cost))
                return

    heap, taken = [], []
    for block, level in enumerate(start):
        push(block, level)
    while heap:
        _, block, to, released, cost = heapq.heappop(heap)
        taken.append((block, -to, released, cost))
        push(block, -to)
    return taken


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["smooth", "wild"]))
def test_actions_come_in_the_order_of_greedy(make_table, seed, kind):
    table = make_table(seed, kind=kind)
    start = np.random.default_rng(seed).integers(0, 6, table.blocks)
    found = order(table.damage, table.pages, start)
    assert list(zip(found.block, found.to, found.pages, strict=True)) == [
        step[:3] for step in greedy(table.damage, table.pages, start)
    ]


def seen(table, bits, *, free=0, growth=0, boundary=1, **more):
    moving = more.pop("moving", np.zeros(table.blocks, bool))
    return Observation(np.asarray(bits), moving, free, growth, boundary, **more)


@pytest.fixture
def table(make_table):
    return make_table(seed=5, layers=2, experts=8)


def make(table, **options):
    policy = get_policy("paper", **{"floor_levels": (0, 0, 0), **options})
    policy.initial(table, int(table.pages[:, -2].sum()), 0)
    return policy


def test_target_is_whole_kv_pages_above_the_threshold(table):
    policy = make(table, offload_below=0.1, reload_above=0.3)
    threshold = -(-table.total_pages(6) // 10 // 4)
    plan = policy.step(seen(table, np.full(table.blocks, 6), free=7, turn_pages=4))
    assert f"release {(threshold + 1 - 1) * 4}" in plan.cause
    assert plan.released_pages >= threshold * 4 and plan.met
    assert policy.step(seen(table, np.full(table.blocks, 6), free=4 * threshold + 4, turn_pages=4)) is None


def test_action_damage_is_multiplier_times_sensitivity_times_residual():
    damage = np.array([[9.0, 3.0, 0.0], [9.0, 3.0, 0.0], [9.0, 3.0, 0.0], [9.0, 3.0, 0.0]])
    heads = ResidualHeads(
        np.full((2, 2, 4), [0, 0, 0, 9.0]), [[1, 0.5], [0, 0]], np.full((2, 2), -1), np.full((2, 2), 2.0)
    )
    table = BlockTable(1, 2, (2, 3, 16), damage, [[1, 2, 3]] * 4, [1] * 4, [[0.8, 0.2]], heads=heads)
    policy = make(table, quantiles=(0.5,), multipliers=(1.0, 3.0), floor_levels=(0, 0), strength=0.5)
    features = np.zeros((4, 4))
    features[:, 3] = 1
    prices = policy._prices(table, np.array([[0.2, 0.8]]), features)
    added = prices.damage[:, :-1] - prices.damage[:, 1:]
    # rho = 9 is clipped to 2; alpha = 0.5; confidence 1 and 0.5 for gate_up, none for down.
    eta = np.exp([0.5 * 1 * 2, 0.5 * 0.5 * 2])
    assert np.allclose(added, [[6 * eta[0], 3 * eta[1]], [6, 3], [18 * eta[0], 9 * eta[1]], [18, 9]])
    flat = BlockTable(1, 2, (2, 3, 16), [[4.0, 4.0, 0.0]] * 4, [[1, 2, 3]] * 4, [1] * 4, [[0.5, 0.5]])
    assert (
        make(flat, quantiles=(), multipliers=(1.0,), floor_levels=(0,))._prices(flat, None, None).damage[:, 0] > 4
    ).all()


def test_depth_caps_hold_until_the_target_needs_more(table):
    bits = np.full(table.blocks, 6)
    capped = table.total_pages(6) - table.total_pages(5)
    for target, deepest in ((capped // 2, 5), (capped, 5), (capped + 1, None)):
        plan = make(table, depth=1).step(seen(table, bits, growth=target - 1, boundary=1))
        room = int(plan.cause.split()[-1].rstrip("."))
        assert plan.met and plan.released_pages >= room
        assert (plan.bits.min() >= 5) == (room <= capped), (target, deepest)


def test_floors_are_relaxed_in_stages_and_at_last_the_reduction_is_the_largest(table):
    floors = (0, 1, 2)
    stages = []
    for growth in range(0, 400, 10):
        policy = get_policy("paper", floor_levels=floors)
        policy.initial(table, int(table.pages[:, -2].sum()), 0)
        plan = policy.step(seen(table, np.full(table.blocks, 6), growth=growth))
        stages.append(plan.stage)
        assert (plan.bits >= plan.floor).all()
    assert stages == sorted(stages) and set(stages) == {0, 1, 2}
    assert plan.status is PlanStatus.UNMET and (plan.bits == 2).all()


def test_the_queue_is_used_between_its_refreshes(table):
    policy = make(table, period=8)
    bits = np.full(table.blocks, 6)
    assert policy.step(seen(table, bits, free=20, boundary=1)) is None
    hot = np.zeros((2, 8))
    hot[:, 0] = 1
    one = policy.step(seen(table, bits, boundary=2, routing_mass=hot))
    moved = {change.block for change in one.changes()}
    moving = np.isin(np.arange(table.blocks), list(moved))
    two = policy.step(seen(table, bits, boundary=3, moving=moving))
    assert two.moves and not moved & {change.block for change in two.changes()}
    # What was planned for other bits is left out until the next refresh.
    changed = np.where(np.arange(table.blocks) % 2, 5, 6)
    three = policy.step(seen(table, changed, boundary=4))
    assert {change.block % 2 for change in three.changes()} == {0}
    four = policy.step(seen(table, changed, growth=60, boundary=9))
    assert {change.block % 2 for change in four.changes()} == {0, 1}


def test_reload_starts_above_its_own_threshold(table):
    policy = make(table, period=1)
    bits, capacity = np.full(table.blocks, 3), table.total_pages(6)
    assert policy.step(seen(table, bits, free=capacity // 10 - 1, boundary=1)) is None
    plan = policy.step(seen(table, bits, free=capacity // 10 + 40, boundary=2))
    assert -40 <= plan.released_pages < 0


def test_prompts_of_the_running_requests_decide_before_the_decayed_mass(table):
    policy = make(table, multipliers=(1.0, 1.0, 100.0), quantiles=(0.5, 0.8))
    bits = np.full(table.blocks, 6)
    hot = np.zeros((2, 8))
    hot[:, 2] = 1
    plan = policy.step(seen(table, bits, growth=60, routing_mass=table.routing_mass, request_mass=hot))
    assert not {table.locate(change.block)[1] for change in plan.changes()} & {2}


def test_constants_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="one multiplier and one floor"):
        get_policy("paper", quantiles=(0.5,))
    with pytest.raises(ValueError, match="offload_below < reload_above"):
        get_policy("paper", offload_below=0.2, reload_above=0.1)

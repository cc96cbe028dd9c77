"""Floors: buckets, stages and the pull of today's routing."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import FloorRule, price


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["smooth", "ties", "wild"]))
def test_stages_relax_to_the_lowest_width(make_table, seed, kind):
    table = make_table(seed, experts=8, kind=kind)
    stages = FloorRule().stages(table, price(table, np.random.default_rng(seed).random((2, 8))).damage)
    assert all((a >= b).all() and (a != b).any() for a, b in pairwise(stages))
    assert (stages[-1] == 2).all()
    assert set(np.unique(stages[0])) <= {2, 3, 4}


def test_the_few_that_matter_are_held_higher(make_table):
    table = make_table(experts=20)
    floor = FloorRule((0.5, 0.9)).stages(table)[0]
    score = table.damage[:, 0] / table.params
    assert np.bincount(floor)[[2, 3, 4]].tolist() == [40, 32, 8]
    assert score[floor == 4].min() > score[floor == 3].max() > score[floor == 2].max()


def test_floors_never_ask_for_16_bits(make_table):
    table = make_table(widths=(3, 4, 16))
    assert FloorRule((0.1, 0.2, 0.3)).stages(table)[0].max() == 4
    assert (FloorRule().stages(make_table(widths=(16,)))[0] == 16).all()


def test_routing_moves_floors(make_table):
    table = make_table(experts=20)
    floor = FloorRule().stages(table)[0]
    mass = table.routing_mass.copy()
    expert = int(floor.reshape(2, 20, 2).max(axis=2)[0].argmin())
    mass[0] *= 0.1
    mass[0, expert] = 9
    moved = FloorRule().stages(table, price(table, mass).damage)[0].reshape(2, 20, 2)[0, expert]
    assert (moved > floor.reshape(2, 20, 2)[0, expert]).all()


@pytest.mark.parametrize("mass", [np.ones((2, 2)), np.full((2, 3), np.nan), -np.ones((2, 3))])
def test_bad_routing_is_refused(make_table, mass):
    with pytest.raises(ValueError, match="routing must be"):
        price(make_table(), mass)


@pytest.mark.parametrize("quantiles", [(0.9, 0.5), (-0.1,), (1.5,)])
def test_bad_quantiles_are_refused(quantiles):
    with pytest.raises(ValueError, match=r"ascend within 0\.\.1"):
        FloorRule(quantiles)

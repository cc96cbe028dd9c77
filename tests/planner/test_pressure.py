"""Pressure: headroom, thresholds and the dead zone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Thresholds, measure

MARKS = Thresholds(0.02, 0.05, 0.10)


def test_headroom_counts_everything_under_way():
    p = measure(1000, free_pages=10, growth_pages=30, blocked_pages=4, releasing_pages=50, reserving_pages=6)
    assert p.headroom_pages == 20 and p.release_pages == 0 and p.spare_pages == 0


def test_each_side_settles_in_the_dead_zone():
    assert measure(1000, 19, thresholds=MARKS).release_pages == 31
    assert measure(1000, 20, thresholds=MARKS).release_pages == 0
    assert measure(1000, 100, thresholds=MARKS).spare_pages == 0
    assert measure(1000, 101, thresholds=MARKS).spare_pages == 51
    assert measure(1000, 0, growth_pages=200, thresholds=MARKS).release_pages == 250


@settings(deadline=None, max_examples=100)
@given(
    capacity=st.integers(1, 10**6),
    free=st.integers(0, 10**6),
    growth=st.integers(0, 10**6),
    marks=st.lists(st.floats(0, 1), min_size=3, max_size=3, unique=True).map(sorted),
)
def test_no_move_sets_off_the_other(capacity, free, growth, marks):
    thresholds = Thresholds(*marks)
    now = measure(capacity, free, growth, thresholds=thresholds)
    assert not (now.release_pages and now.spare_pages)
    assert now.release_pages >= 0 and now.spare_pages >= 0
    after = measure(capacity, free + now.release_pages - now.spare_pages, growth, thresholds=thresholds)
    assert (after.release_pages, after.spare_pages) == (0, 0)


def test_by_default_nothing_is_given_up_before_it_is_needed():
    assert measure(1000, 20, growth_pages=20).release_pages == 0
    assert measure(1000, 20, growth_pages=21).release_pages > 0


def test_shortage_counts_at_any_threshold():
    assert measure(100, 3, growth_pages=5, thresholds=Thresholds(0, 0, 0.5)).release_pages == 2


@pytest.mark.parametrize("marks", [(0.2, 0.1, 0.3), (0.1, 0.3, 0.3), (-0.1, 0.1, 0.2), (0.1, 0.2, 1.1)])
def test_thresholds_must_ascend(marks):
    with pytest.raises(ValueError, match="demote_below <= settle_at < promote_above"):
        Thresholds(*marks)


def test_pressure_reads_well():
    assert str(measure(1000, 0, thresholds=MARKS)) == "Headroom is 0 pages: release 50."
    assert str(measure(1000, 60, thresholds=MARKS)) == "Headroom is 60 pages: nothing to do."
    assert "51 may be spent" in str(measure(1000, 101, thresholds=MARKS))

"""Plan: its figures, its changes and its text."""

import numpy as np
import pytest

from planner import BlockTable, Plan, PlanStatus


@pytest.fixture
def table() -> BlockTable:
    damage = [[4.0, 1.0, 0.0], [2.0, 0.5, 0.0]]
    return BlockTable(1, 1, (2, 3, 16), damage, [[5, 7, 32], [3, 4, 16]], [200, 100], [[1.0]])


def test_figures_and_changes(table):
    plan = Plan(table, np.array([16, 2]), np.array([3, 2]), cause="Because.", bound=3.0)
    assert plan.met and plan.moves
    assert (plan.pages_before, plan.pages_after, plan.released_pages) == (35, 10, 25)
    assert plan.damage == 3.0
    (change,) = plan.changes()
    assert (change.block, change.matrix, change.from_bits, change.to_bits) == (0, 0, 16, 3)
    assert (change.pages, change.damage) == (-25, 1.0)
    assert plan.reasons == {0: "16 -> 3 bits releases 25 pages and adds 1 damage"}


def test_changes_against_other_bits(table):
    plan = Plan(table, np.array([16, 2]), np.array([3, 2]))
    assert plan.changes(np.array([3, 2])) == []
    (change,) = plan.changes([3, 3])
    assert (change.block, change.from_bits, change.to_bits, change.pages) == (1, 3, 2, -1)


def test_explain_reads_well(table):
    plan = Plan(table, np.array([16, 2]), np.array([2, 3]), PlanStatus.UNMET, 2, "Headroom is low.", 4.5)
    text = plan.explain()
    assert text.splitlines()[0] == "Headroom is low."
    assert "largest safe reduction" in text and "stage 2" in text
    assert "35 -> 9 (-26)" in text
    assert "layer 0 expert 0 down: 2 -> 3 bits takes 1 page and removes 1.5 damage" in text
    assert "1 at 2 bits, 1 at 3 bits" in text
    assert "and 1 more blocks" in plan.explain(limit=1)


def test_statuses_are_sentences():
    assert all(s.value[0].isupper() and s.value.endswith(".") for s in PlanStatus)

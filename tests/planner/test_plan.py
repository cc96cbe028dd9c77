"""Plan: its figures, its changes and its text."""

import re
from dataclasses import replace

import numpy as np
import pytest

from planner import BlockTable, FloorRule, Plan, PlanStatus, ResidualHeads, demote, find_block, price


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


def test_a_block_is_explained_by_everything_that_decided(make_table):
    table = make_table(seed=1, experts=4)
    heads = ResidualHeads(np.zeros((2, 5, 4)), np.ones((2, 5)), np.zeros((2, 5)), np.ones((2, 5)))
    table = replace(table, heads=heads, floors=np.full(table.blocks, 3))
    mass = np.roll(table.routing_mass, 1, axis=1)
    prices = price(table, mass, None, np.zeros((table.blocks, 4)))
    plan = demote(table, np.full(table.blocks, 6), 20, FloorRule().stages(table), prices=prices)
    demoted = plan.changes()[0].block
    text = plan.explain(block=demoted)
    for words in (
        f"{table.name(demoted)} (block {demoted}): {plan.bits[demoted]} bits, planned from 6",
        "of its layer in calibration, now x", "residual  the prompts change", "calibration advises 3", "at stage 0",
    ):
        assert words in text
    # The ranks of all blocks are 1 to the number of blocks that can move.
    ranks = [re.search(r"up .* rank (\d+) of (\d+)", plan.explain(block=i)) for i in range(table.blocks)]
    found = sorted(int(match[1]) for match in ranks if match)
    assert found == list(range(1, len(found) + 1)) and int(ranks[demoted][2]) == len(found)
    lowest = demote(table, np.full(table.blocks, 6), 10**6, FloorRule().stages(table))
    assert (lowest.bits == lowest.floor).all() and "no move: it is at its floor" in lowest.explain(block=0)


def test_blocks_have_two_names(make_table):
    table = make_table(layers=2, experts=3)
    assert find_block(table, "1.2.down") == find_block(table, "11") == 11
    for text in ("12", "-1", "2.0.down", "0.3.down", "0.0.up", "0.0", "x", "0.0.down.1"):
        with pytest.raises(ValueError, match="there is no block"):
            find_block(table, text)

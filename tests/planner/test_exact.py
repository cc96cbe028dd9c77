"""How far plans are from the optimum, by an exact solver; small ones are the optimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import block_diag, csr_matrix

from planner import demote, fit, promote

KINDS = ("smooth", "ties", "wild")


def lower_bound(table, low, high, limit_pages, scale, exact=True):
    """Proven least damage within levels ``low..high`` at no more than ``limit_pages``; None where nothing fits.

    ``scale``: damage about as large as the answer; the solver's tolerances are absolute.
    """
    n, width = table.pages.shape
    column = np.arange(width)
    allowed = (column >= low[:, None]) & (column <= high[:, None])
    each = LinearConstraint(block_diag([np.ones((1, width))] * n, format="csr"), 1, 1)
    within = LinearConstraint(csr_matrix(table.pages.reshape(1, -1)), -np.inf, limit_pages)
    scale = scale or 1.0
    result = milp(
        table.damage.ravel() / scale, integrality=1, bounds=(0, allowed.ravel().astype(float)),
        constraints=[each, within], options={"mip_rel_gap": 1e-9 if exact else 1e-3, "time_limit": 30},
    )  # fmt: skip
    return None if result.mip_dual_bound is None or result.x is None else result.mip_dual_bound * scale


def some_plan(table, seed):
    """A demotion, a promotion or a static plan; with the levels and pages that it may have."""
    rng = np.random.default_rng(seed)
    width, start = len(table.widths), rng.integers(0, len(table.widths), table.blocks)
    zeros, top = np.zeros(table.blocks, int), np.full(table.blocks, width - 1)
    held = table.total_pages(table.bits(start))
    kind = seed % 3
    if kind == 0:
        least = np.where(np.arange(width) <= start[:, None], table.pages, table.pages.max()).min(axis=1).sum()
        target = int(rng.uniform(0.05, 0.7) * (held - least))
        return demote(table, table.bits(start), target), zeros, start, held - target
    if kind == 1:
        spare = max(0, int(rng.uniform(0.05, 0.7) * (table.total_pages(16) - held)))
        return promote(table, table.bits(start), spare), start, top, held + spare
    low, high = (int(pages.sum()) for pages in (table.pages.min(axis=1), table.pages.max(axis=1)))
    capacity = int(low + rng.uniform(0.05, 0.7) * (high - low))
    return fit(table, capacity), zeros, top, capacity


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), experts=st.integers(1, 12))
def test_small_instances_are_finished_exactly(make_table, seed, kind, experts):
    table = make_table(seed, layers=1, experts=experts, kind=kind)
    plan, low, high, limit = some_plan(table, seed)
    best = lower_bound(table, low, high, limit, plan.damage)
    if plan.met and best is not None:
        assert plan.pages_after <= limit
        assert plan.damage <= best * (1 + 1e-5) + 1e-12


def gap(table, seed):
    plan, low, high, limit = some_plan(table, seed)
    best = lower_bound(table, low, high, limit, plan.damage, exact=False)
    assert plan.met and best is not None and plan.pages_after <= limit
    return plan.damage / best - 1 if best else plan.damage


def test_large_instances_are_within_a_percent_of_the_optimum(make_table):
    for seed in range(2):
        assert gap(make_table(seed, layers=4, experts=32 + seed), seed) <= 0.01
    for seed in range(20):
        plan = some_plan(make_table(seed, layers=8, experts=32, kind=KINDS[seed % 2 * 2]), seed)[0]
        # No plan is below the relaxation, so this proves it without the exact solver.
        assert plan.damage <= 1.01 * plan.bound + 1e-12, seed


@pytest.mark.slow
def test_two_hundred_large_instances_are_within_a_percent_of_the_optimum(make_table):
    gaps = [gap(make_table(s, layers=4, experts=32 + s % 24, kind=KINDS[s % 5 % 3]), s) for s in range(200)]
    assert max(gaps) <= 0.01


def test_plans_of_the_bundled_model_are_optimal():
    from pwjax.loading import open_model

    table = open_model(None).table()
    # As far as the bound of the exact solver goes, which stops at 0.001.
    assert max(gap(table, seed) for seed in range(12)) <= 0.0011
    for bits in (3, 4):
        low, capacity = np.zeros(table.blocks, int), table.total_pages(bits) + 17
        plan, top = fit(table, capacity), np.full(table.blocks, len(table.widths) - 1)
        assert plan.damage <= 1.001 * lower_bound(table, low, top, capacity, plan.damage, exact=False)
        down = demote(table, np.full(table.blocks, 6), table.total_pages(6) - capacity)
        best = lower_bound(table, low, np.full(table.blocks, 4), capacity, down.damage, exact=False)
        assert down.met and down.damage <= 1.001 * best

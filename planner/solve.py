"""The solver: which blocks to move so that a page target costs the least damage.

Each block is a curve of damage over pages. Only the lower convex hull of a curve can be part of an optimal
relaxed plan, so a walk along the hull gives a block's steps with ever worse rates (damage a page), and taking
the steps of all blocks by rate is the LP relaxation of the multiple-choice knapsack. Its last step is the only
one that does not fit; it is replaced by the best single move, hull or not, that does. So

    bound <= optimum <= damage <= bound + damage of one step          (tested against an exact MILP)

Equal rates go to the lower block index, then to the nearer width: equal inputs give equal plans. Functions are
vectorised over blocks: 2,880 blocks of 6 widths take a few milliseconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.plan import Plan, PlanStatus
from planner.tables import BlockTable


def demote(
    table: BlockTable,
    bits: np.ndarray,
    release_pages: int,
    floors: Sequence[np.ndarray] = (),
    frozen: np.ndarray | None = None,
    cause: str = "",
) -> Plan:
    """Lower bits until ``release_pages`` are free, for the least damage.

    ``bits`` int[n]: bits now. ``floors``: stages of floor bits int[n] (or one width), strictest first; the first
    stage that releases enough is used, and a block below its floor already just stays. None: the lowest width.
    ``frozen`` bool[n]: blocks not to touch. Where no stage suffices, the plan is the largest reduction that the
    last stage allows and says ``UNMET``. What the last move releases beyond the target is spent again where it helps.
    """
    start = table.level(bits)
    stages = list(floors) or [table.widths[0]]
    for stage in range(len(stages)):
        bottom = np.minimum(table.level(stages[stage]), start)
        if frozen is not None:
            bottom = np.where(frozen, start, bottom)
        level, met, bound = _descend(table, start, bottom, release_pages)
        if met:
            break
    status = PlanStatus.MET if met else PlanStatus.UNMET
    return Plan(table, table.bits(start), table.bits(level), status, stage, cause, bound)


def promote(
    table: BlockTable,
    bits: np.ndarray,
    spare_pages: int,
    ceiling_pages: int | None = None,
    frozen: np.ndarray | None = None,
    cause: str = "",
) -> Plan:
    """Raise bits within ``spare_pages`` (and ``ceiling_pages``, the most that one plan may move) for the most gain.

    ``bits`` int[n]: bits now. ``frozen`` bool[n]: blocks not to touch. Never lowers a block; a raise that removes
    no damage is not made, so a plan may move nothing.
    """
    start = table.level(bits)
    top = np.full(table.blocks, len(table.widths) - 1)
    if frozen is not None:
        top = np.where(frozen, start, top)
    budget = spare_pages if ceiling_pages is None else min(spare_pages, ceiling_pages)
    level, bound = _climb(table, start, top, budget)
    return Plan(table, table.bits(start), table.bits(level), cause=cause, bound=bound)


def fit(table: BlockTable, capacity_pages: int, floor: np.ndarray | int | None = None, cause: str = "") -> Plan:
    """The best static plan that holds at most ``capacity_pages``, climbing from ``floor`` (default: lowest width).

    More capacity never gives more damage. Where even the floor does not fit, the plan is the floor and says
    ``TOO_SMALL``. A static plan moves nothing: its ``before`` is its ``bits``.
    """
    start = table.level(table.widths[0] if floor is None else floor)
    left = capacity_pages - table.total_pages(table.bits(start))
    level, bound = _climb(table, start, np.full(table.blocks, len(table.widths) - 1), left)
    bits = table.bits(level)
    return Plan(table, bits, bits, PlanStatus.TOO_SMALL if left < 0 else PlanStatus.MET, cause=cause, bound=bound)


def uniform(table: BlockTable, bits: int, capacity_pages: int | None = None, cause: str = "") -> Plan:
    """All blocks at one width; ``TOO_SMALL`` where a given capacity does not hold them."""
    wanted = table.bits(table.level(bits))
    fits = capacity_pages is None or table.total_pages(wanted) <= capacity_pages
    status = PlanStatus.MET if fits else PlanStatus.TOO_SMALL
    return Plan(table, wanted, wanted, status, cause=cause)


class _Steps(NamedTuple):
    """Hull steps of all blocks in the order to take them."""

    block: np.ndarray  # int64[s]
    to: np.ndarray  # int64[s] level after the step
    pages: np.ndarray  # int64[s] pages released or taken, positive
    rate: np.ndarray  # float64[s] damage added a page, ascending; negative for raises


def _moves(table: BlockTable, level: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every single move of a block from its ``level`` towards its ``end``, which lies all above or all below.

    Returns pages moved int64[n, B] (positive), damage added float64[n, B] and which moves are legal bool[n, B]:
    within reach, and in the direction that pages should go.
    """
    rows, column = np.arange(table.blocks)[:, None], np.arange(len(table.widths))
    at, end = level[:, None], end[:, None]
    pages = table.pages - table.pages[rows, at]
    damage = table.expected - table.expected[rows, at]
    down = (column < at) & (column >= end) & (pages < 0)
    up = (column > at) & (column <= end) & (pages > 0) & (damage < 0)
    return np.abs(pages), damage, down | up


def _hull(table: BlockTable, level: np.ndarray, end: np.ndarray) -> _Steps:
    """Steps along every block's lower convex hull from ``level`` to ``end``, sorted by rate."""
    n, width = table.pages.shape
    rows = np.arange(n)
    # Nearer widths first, so that of several moves on one straight edge the smallest comes first.
    nearest = slice(None) if (end >= level).all() else slice(None, None, -1)
    rate = np.full((n, width - 1), np.inf)
    to = np.zeros((n, width - 1), np.int64)
    size = np.zeros((n, width - 1), np.int64)
    last = np.full(n, -np.inf)
    for k in range(width - 1):
        pages, damage, legal = _moves(table, level, end)
        rates = np.where(legal, damage / np.maximum(pages, 1), np.inf)[:, nearest]
        best = rates.argmin(axis=1)
        # Rounding must not let a block's later step overtake an earlier one in the sort.
        last = rate[:, k] = np.maximum(rates[rows, best], last)
        moved = np.isfinite(last)
        if not moved.any():
            break
        to[:, k] = level = np.where(moved, np.arange(width)[nearest][best], level)
        size[:, k] = pages[rows, level]
    order = np.argsort(rate, axis=None, kind="stable")[: np.isfinite(rate).sum()]
    return _Steps(order // max(width - 1, 1), to.flat[order], size.flat[order], rate.flat[order])


def _descend(table: BlockTable, start: np.ndarray, bottom: np.ndarray, release: int) -> tuple[np.ndarray, bool, float]:
    """Levels that release ``release`` pages between ``start`` and ``bottom``, whether they do, and the LP bound."""
    damage = table.total_damage(table.bits(start))
    if release <= 0:
        return start, True, damage
    steps = _hull(table, start, bottom)
    released = np.cumsum(steps.pages)
    count = int(np.searchsorted(released, release))  # steps before the one that reaches the target
    level = start.copy()
    np.minimum.at(level, steps.block[:count], steps.to[:count])
    bound = damage + float((steps.pages * steps.rate)[:count].sum())
    if count == len(released):
        return level, False, bound
    missing = release - (int(released[count - 1]) if count else 0)
    pages, added, legal = _moves(table, level, bottom)
    block, to = _cheapest(np.where(legal & (pages >= missing), added, np.inf), pages)
    excess = int(pages[block, to]) - missing
    level[block] = to
    # The last move may have released more than was missing: give back what it made unnecessary.
    return _climb(table, level, start, excess)[0], True, bound + missing * float(steps.rate[count])


def _climb(table: BlockTable, start: np.ndarray, top: np.ndarray, budget: int) -> tuple[np.ndarray, float]:
    """Levels between ``start`` and ``top`` that take at most ``budget`` pages, and the LP bound."""
    damage = table.total_damage(table.bits(start))
    if budget <= 0:
        return start, damage
    steps = _hull(table, start, top)
    taken = np.cumsum(steps.pages)
    count = int(np.searchsorted(taken, budget, side="right"))  # steps that fit
    level = start.copy()
    np.maximum.at(level, steps.block[:count], steps.to[:count])
    bound = damage + float((steps.pages * steps.rate)[:count].sum())
    if count == len(taken):
        return level, bound
    # One move only: filling on greedily could make a larger budget end with more damage.
    left = budget - (int(taken[count - 1]) if count else 0)
    pages, added, legal = _moves(table, level, top)
    fits = legal & (pages <= left)
    if fits.any():
        block, to = _cheapest(np.where(fits, added, np.inf), pages)
        level[block] = to
    return level, bound + left * float(steps.rate[count])


def _cheapest(added: np.ndarray, pages: np.ndarray) -> tuple[int, int]:
    """``(block, level)`` of the least added damage, then the fewest pages, then the lowest block."""
    ties = np.argwhere(added == added.min())
    block, to = ties[np.argmin(pages[ties[:, 0], ties[:, 1]])]
    return int(block), int(to)

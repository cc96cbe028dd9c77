"""The solver: which blocks to move so that a page target costs the least damage.

Steps along every block's convex hull, taken by damage a page (:mod:`planner.hull`), are the LP relaxation. Its last
step is the only one that does not fit; it is replaced by the best single move, hull or not, that does, and
:mod:`planner.exact` closes what is left of the gap: to nothing for fewer than 256 blocks. So

    bound <= optimum <= damage <= bound + damage of one step          (tested against an exact MILP)

Equal rates go to the lower block index, then to the nearer width: equal inputs give equal plans.
"""

from collections.abc import Sequence

import numpy as np

from planner.damage import Prices
from planner.exact import improve
from planner.hull import between, hull, moves
from planner.plan import Plan, PlanStatus
from planner.tables import BlockTable


def demote(
    table: BlockTable,
    bits: np.ndarray,
    release_pages: int,
    floors: Sequence[np.ndarray] = (),
    frozen: np.ndarray | None = None,
    cause: str = "",
    *,
    prices: Prices | None = None,
    depth: int | None = None,
    max_damage: float | None = None,
) -> Plan:
    """Lower bits until ``release_pages`` are free, for the least damage.

    ``bits`` int[n]: bits now. ``floors``: stages of floor bits int[n] (or one width), strictest first; the first
    stage that releases enough is used, and a block below its floor already just stays. None: the lowest width.
    ``depth``: widths that a block may drop, given up in a stage only where the stage does not suffice with it.
    ``frozen`` bool[n]: blocks not to touch. ``prices``: what damage is now, None: as calibrated. Where no stage
    suffices, or damage would exceed ``max_damage``, the plan is the largest reduction allowed and says ``UNMET``.
    """
    prices = prices or Prices(table.expected)
    start = table.level(bits)
    stages = [table.level(stage) for stage in floors] or [np.zeros_like(start)]
    stage, bottom = _reach(table.pages, start, stages, release_pages, frozen, depth)
    level, met, bound = _descend(prices.damage, table.pages, start, bottom, release_pages, max_damage)
    status = PlanStatus.MET if met else PlanStatus.UNMET
    floor = table.bits(np.maximum(bottom, stages[stage]))
    return Plan(table, table.bits(start), table.bits(level), status, stage, cause, bound, prices, floor)


def promote(
    table: BlockTable,
    bits: np.ndarray,
    spare_pages: int,
    ceiling_pages: int | None = None,
    frozen: np.ndarray | None = None,
    cause: str = "",
    *,
    prices: Prices | None = None,
) -> Plan:
    """Raise bits within ``spare_pages`` (and ``ceiling_pages``, the most that one plan may move) for the most gain.

    ``bits`` int[n]: bits now. ``frozen`` bool[n]: blocks not to touch. Never lowers a block; a raise that removes
    no damage is not made, so a plan may move nothing.
    """
    prices = prices or Prices(table.expected)
    start = table.level(bits)
    top = np.full(table.blocks, len(table.widths) - 1)
    if frozen is not None:
        top = np.where(frozen, start, top)
    budget = spare_pages if ceiling_pages is None else min(spare_pages, ceiling_pages)
    level, bound = _climb(prices.damage, table.pages, start, top, budget)
    return Plan(table, table.bits(start), table.bits(level), cause=cause, bound=bound, prices=prices)


def next_demotion(
    table: BlockTable,
    bits: np.ndarray,
    prices: Prices | None = None,
    frozen: np.ndarray | None = None,
    floor_bits: int = 0,
) -> float:
    """Damage a page that the cheapest single demotion from ``bits`` int[n] adds, infinite where there is none.

    ``prices`` and ``frozen`` as in :func:`demote`; no block may go below ``floor_bits``.
    """
    level = table.level(bits)
    least = next((i for i, b in enumerate(table.widths) if b >= floor_bits), len(table.widths) - 1)
    damage = (prices or Prices(table.expected)).damage
    pages, added, legal = moves(damage, table.pages, level, np.minimum(level, least))
    if frozen is not None:
        legal &= ~frozen[:, None]
    return float(np.min(np.where(legal, np.maximum(added, 0) / np.maximum(pages, 1), np.inf)))


def fit(
    table: BlockTable,
    capacity_pages: int,
    floor: np.ndarray | int | None = None,
    cause: str = "",
    *,
    prices: Prices | None = None,
) -> Plan:
    """The best static plan that holds at most ``capacity_pages``, climbing from ``floor`` (default: lowest width).

    Where even the floor does not fit, the plan is the floor and says ``TOO_SMALL``. A static plan moves nothing: its
    ``before`` is its ``bits``.
    """
    prices = prices or Prices(table.expected)
    top = np.full(table.blocks, len(table.widths) - 1)
    start = _lean(table.pages, table.level(table.widths[0] if floor is None else floor), top)
    left = capacity_pages - table.total_pages(table.bits(start))
    level, bound = _climb(prices.damage, table.pages, start, top, left)
    bits = table.bits(level)
    status = PlanStatus.TOO_SMALL if left < 0 else PlanStatus.MET
    return Plan(table, bits, bits, status, cause=cause, bound=bound, prices=prices, floor=table.bits(start))


def uniform(table: BlockTable, bits: int, capacity_pages: int | None = None, cause: str = "") -> Plan:
    """All blocks at one width; ``TOO_SMALL`` where a given capacity does not hold them."""
    wanted = table.bits(table.level(bits))
    fits = capacity_pages is None or table.total_pages(wanted) <= capacity_pages
    status = PlanStatus.MET if fits else PlanStatus.TOO_SMALL
    return Plan(table, wanted, wanted, status, cause=cause)


def _reach(
    pages: np.ndarray,
    start: np.ndarray,
    stages: Sequence[np.ndarray],
    release: int,
    frozen: np.ndarray | None,
    depth: int | None,
) -> tuple[int, np.ndarray]:
    """The first stage that can release enough, else the last; and the levels int64[n] down to which it may go."""
    held = pages[np.arange(len(start)), start]
    caps = [None] if depth is None else [depth, None]
    reaches = [(i, cap) for i in range(len(stages)) for cap in caps]
    for stage, cap in reaches:
        bottom = np.minimum(stages[stage], start)
        if cap is not None:
            bottom = np.maximum(bottom, start - cap)
        if frozen is not None:
            bottom = np.where(frozen, start, bottom)
        # What can be released at most is known before anything is solved.
        most = held - np.where(between(bottom, start, pages.shape[1]), pages, held[:, None]).min(axis=1)
        if most.sum() >= release or (stage, cap) == reaches[-1]:
            return stage, bottom
    raise AssertionError("there is always a last stage")


def _descend(
    damage: np.ndarray,
    pages: np.ndarray,
    start: np.ndarray,
    bottom: np.ndarray,
    release: int,
    max_damage: float | None = None,
) -> tuple[np.ndarray, bool, float]:
    """Levels that release ``release`` pages between ``start`` and ``bottom``, whether they do, and the LP bound."""
    rows = np.arange(len(start))
    have = float(damage[rows, start].sum())
    if release <= 0:
        return start, True, have
    steps = hull(damage, pages, start, bottom)
    released = np.cumsum(steps.pages)
    count = int(np.searchsorted(released, release))  # steps before the one that reaches the target
    bound = have + float((steps.pages * steps.rate)[:count].sum())
    level = _taken(start, steps, count, down=True)
    met = count < len(released)
    if met:
        missing = release - (int(released[count - 1]) if count else 0)
        bound += missing * float(steps.rate[count])
        level = _finish(damage, pages, start, bottom, level, missing, release, float(steps.rate[count]))
    if max_damage is None or float(damage[rows, level].sum()) <= max_damage:
        return level, met, bound
    dearer = np.cumsum(steps.pages * steps.rate) > max_damage - have
    return _taken(start, steps, int(dearer.argmax()) if dearer.any() else len(dearer), down=True), False, bound


def _finish(damage, pages, start, bottom, level, missing: int, release: int, rate: float) -> np.ndarray:
    """``level`` with the best single move that releases what is ``missing``, then improved."""
    size, added, legal = moves(damage, pages, level, bottom)
    block, to = _cheapest(np.where(legal & (size >= missing), added, np.inf), size)
    level[block] = to
    allowed = moves(damage, pages, start, bottom)[2]
    allowed[np.arange(len(start)), level] = allowed[np.arange(len(start)), start] = True
    limit = int(pages[np.arange(len(start)), start].sum()) - release
    return improve(damage, pages, allowed, level, limit, max(rate, 0.0))


def _climb(
    damage: np.ndarray, pages: np.ndarray, start: np.ndarray, top: np.ndarray, budget: int
) -> tuple[np.ndarray, float]:
    """Levels between ``start`` and ``top`` that take at most ``budget`` pages, and the LP bound."""
    rows = np.arange(len(start))
    if budget < 0:
        return start, float(damage[rows, start].sum())
    lean = _lean(pages, start, top)
    budget += int((pages[rows, start] - pages[rows, lean]).sum())
    start, have = lean, float(damage[rows, lean].sum())
    steps = hull(damage, pages, start, top)
    taken = np.cumsum(steps.pages)
    count = int(np.searchsorted(taken, budget, side="right"))  # steps that fit
    level = _taken(start, steps, count, down=False)
    bound = have + float((steps.pages * steps.rate)[:count].sum())
    if count == len(taken):
        return level, bound
    left, rate = budget - (int(taken[count - 1]) if count else 0), float(steps.rate[count])
    size, added, legal = moves(damage, pages, level, top)
    fits = legal & (size <= left)
    if fits.any():
        block, to = _cheapest(np.where(fits, added, np.inf), size)
        level[block] = to
    allowed = moves(damage, pages, start, top)[2]
    allowed[rows, level] = allowed[rows, start] = True
    level = improve(damage, pages, allowed, level, int(pages[rows, start].sum()) + budget, -rate)
    return level, bound + left * rate


def _lean(pages: np.ndarray, level: np.ndarray, top: np.ndarray) -> np.ndarray:
    """The level of each block from ``level`` to ``top`` with the fewest pages, the highest of several.

    It is where a climb begins: damage never grows with bits, so whatever lies below is no better. Only of tiny blocks
    is it another level than ``level``.
    """
    reach = np.where(between(level, top, pages.shape[1]), pages, np.iinfo(np.int64).max)[:, ::-1]
    return pages.shape[1] - 1 - reach.argmin(axis=1)


def _taken(start: np.ndarray, steps, count: int, down: bool) -> np.ndarray:
    """Levels after the first ``count`` steps."""
    level = start.copy()
    # Later steps of a block come later, and the last assignment to an index stays.
    (np.minimum if down else np.maximum).at(level, steps.block[:count], steps.to[:count])
    return level


def _cheapest(added: np.ndarray, pages: np.ndarray) -> tuple[int, int]:
    """``(block, level)`` of the least added damage, then the fewest pages, then the lowest block."""
    ties = np.argwhere(added == added.min())
    block, to = ties[np.argmin(pages[ties[:, 0], ties[:, 1]])]
    return int(block), int(to)

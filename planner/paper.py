"""The policy of the PagedWeight paper (arXiv 2607.16184), equations 3-8 and Algorithm 1 as written.

Where the paper leaves a constant open it is a field of :class:`PaperPolicy`; ``experiments/planner_search`` found its
value. Where it leaves a choice open:

- the score of an action is per transition and greedy takes the next legal step of a block, so no convex hull;
- a transition that frees nothing (a LUT can outgrow its planes) is joined with the next one down;
- stages are descending floors, the best plan is the one of the first stage that meets the target, with the depth
  caps if they allow it; a queued plan is the whole order of actions, and a target takes as much of it as it needs;
- free pages count what is on its way and what running sequences will need: both are monitored in the paper;
- reload has no scoring rule there: most damage removed per page first, in the same prices, from a second threshold.
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np

from planner.damage import Prices, above, steps
from planner.floors import highest, staged
from planner.hull import ascending
from planner.observe import Observation, leaving
from planner.plan import Plan, PlanStatus
from planner.solve import promote
from planner.tables import BlockTable, shares


class Actions(NamedTuple):
    """Reductions by one legal width each, in the order in which greedy takes them."""

    block: np.ndarray  # int64[s]
    to: np.ndarray  # int64[s] level after the action
    pages: np.ndarray  # int64[s] released (eq. 3)
    damage: np.ndarray  # float64[s] d_hat (eq. 8)

    def where(self, keep: np.ndarray) -> "Actions":
        """Those of ``keep`` bool[s]."""
        return Actions(*(field[keep] for field in self))

    def until(self, target_pages: int) -> "Actions":
        """The fewest from the front that release ``target_pages``, or all."""
        count = int(np.searchsorted(np.cumsum(self.pages), target_pages)) + 1
        return Actions(*(field[:count] for field in self))


class Queued(NamedTuple):
    """An entry of the plan queue Q: all actions that a stage allows, from the bits at ``start``."""

    actions: Actions
    floor: np.ndarray  # int64[n] levels
    start: np.ndarray  # int64[n] levels


@dataclass
class PaperPolicy:
    """Sensitivity times bucket multiplier times prompt residual, greedy by damage per byte, staged floors, plan queue.

    ``offload_below`` and ``reload_above``: T_blk and the reload threshold as shares of the arena (a dead zone lies
    between). ``period``: boundaries between two refreshes of the queue. ``quantiles``: bounds of the buckets of
    routing mass within a layer; ``multipliers`` (mu) and ``floor_levels`` (widths above the lowest, at the first
    stage) a bucket, coldest first. ``depth``: widths that one plan may take from a block, given up only where the
    target cannot be met with it. ``epsilon``: least damage of an action, relative to the mean over all. ``strength``:
    alpha. Confidence and clip bounds come with the heads.
    """

    offload_below: float = 0.02
    reload_above: float = 0.10
    period: int = 2
    quantiles: tuple[float, ...] = (0.33, 0.67)
    multipliers: tuple[float, ...] = (0.5, 1.0, 2.0)
    floor_levels: tuple[int, ...] = (0, 0, 1)
    depth: int = 5
    epsilon: float = 1e-6
    strength: float = 1.0
    damage_form: ClassVar[str | None] = "paper"
    moves: ClassVar[bool] = True

    def __post_init__(self):
        if not len(self.multipliers) == len(self.floor_levels) == len(self.quantiles) + 1:
            raise ValueError("the paper's policy needs one multiplier and one floor level for each bucket")
        if not 0 <= self.offload_below < self.reload_above <= 1 or self.period < 1 or self.depth < 1:
            raise ValueError("the paper's policy needs 0 <= offload_below < reload_above <= 1, period and depth >= 1")

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """From the widest bits down by offline sensitivity until the reserve is left."""
        self._table, self._capacity_pages, self._queue = table, capacity_pages, []
        self._planned_at: int | None = None
        room = capacity_pages - reserve_pages
        top = np.full(table.blocks, len(table.widths) - 1)
        prices = self._prices(table, None, None)
        actions = order(prices.damage, table.pages, top)
        target = int(table.pages[:, -1].sum()) - room
        taken = actions.until(target) if target > 0 else actions.where(np.zeros(len(actions.block), bool))
        bits = table.bits(_after(top, taken))
        status = PlanStatus.MET if table.total_pages(bits) <= room else PlanStatus.TOO_SMALL
        return Plan(table, bits, bits, status, cause=leaving(reserve_pages), prices=prices)

    def step(self, o: Observation) -> Plan | None:
        """Algorithm 1: refresh the queue each period; offload from it, or reload."""
        table = self._table
        mass = o.routing_mass if o.request_mass is None else o.request_mass
        due = self._planned_at is None or o.boundary >= self._planned_at + self.period
        release_pages = self._target(o)
        if due:
            self._prices_now = self._prices(table, mass, o.residual)
            self._queue, self._planned_at = self._plan_all(o, mass), o.boundary
        if release_pages:
            cause = f"{o.headroom_pages} pages are left: release {release_pages}."
            return self._best(o, release_pages, cause)
        spare_pages = o.headroom_pages - ceil(self.reload_above * self._capacity_pages)
        if due and spare_pages > 0:
            cause = f"{o.headroom_pages} pages are left: {spare_pages} may be spent."
            plan = promote(table, o.bits, spare_pages, None, o.moving, cause, prices=self._prices_now)
            return plan if plan.moves else None
        return None

    def _target(self, o: Observation) -> int:
        """Pages to release: ``max(0, T_blk + 1 - F_blk) * B_KV`` (eq. 7), in whole KV turns of a sequence."""
        threshold = ceil(self.offload_below * self._capacity_pages / o.turn_pages)
        return max(0, threshold + 1 - o.headroom_pages // o.turn_pages) * o.turn_pages

    def _prices(self, table: BlockTable, mass: np.ndarray | None, features: np.ndarray | None) -> Prices:
        """Damage whose differences are d_hat: ``max(eps, mu * g * eta)`` of every transition (eq. 4-6 and 8)."""
        added = steps(table.expected)
        least = self.epsilon * float(added.mean()) if added.size else 0.0
        multiplier = eta = None
        if mass is not None:
            multiplier = np.asarray(self.multipliers)[self._buckets(table, mass)]
            added = multiplier[:, None] * added
        if features is not None and table.heads is not None:
            eta = table.heads.factor(features, self.strength)
            added = added * eta
        added = np.maximum(added, least)
        return Prices(above(added, np.zeros(table.blocks)), multiplier, eta)

    def _buckets(self, table: BlockTable, mass: np.ndarray) -> np.ndarray:
        """Bucket int64[n] of every block by the routing mass of its expert (eq. 1), within its layer."""
        share = shares(mass)
        above = [share > bound[:, None] for bound in np.quantile(share, self.quantiles, axis=1)]
        return np.repeat(np.sum(above, axis=0).ravel(), 2)

    def _plan_all(self, o: Observation, mass: np.ndarray | None) -> list[Queued]:
        """The queue: one entry a stage, safest first."""
        table = self._table
        start = table.level(o.bits)
        level = np.asarray(self.floor_levels)[self._buckets(table, table.routing_mass if mass is None else mass)]
        advised = np.zeros(table.blocks, int) if table.floors is None else table.level(table.floors)
        actions = order(self._prices_now.damage, table.pages, start)
        least = int(table.level(o.least(table))[0])
        floors = [np.maximum(floor, least) for floor in staged(level, highest(table), advised)]
        return [Queued(actions.where(actions.to >= floor[actions.block]), floor, start) for floor in floors]

    def _best(self, o: Observation, release_pages: int, cause: str) -> Plan:
        """The first queued plan that meets the target, with depth caps if it can; else the largest reduction."""
        table = self._table
        level = table.level(o.bits)

        def plan(stage: int, queued: Queued, taken: Actions, status: PlanStatus) -> Plan:
            bits = table.bits(_after(level, taken))
            floor = table.bits(queued.floor)
            return Plan(table, np.array(o.bits), bits, status, stage, cause, None, self._prices_now, floor)

        legal = None
        for stage, queued in enumerate(self._queue):
            # A queued plan holds for the blocks that are still as it found them.
            legal = queued.actions.where(((level == queued.start) & ~o.moving)[queued.actions.block])
            capped = legal.where(legal.to >= (queued.start - self.depth)[legal.block])
            for actions in (capped, legal):
                if actions.pages.sum() >= release_pages:
                    return plan(stage, queued, actions.until(release_pages), PlanStatus.MET)
        assert legal is not None, "the queue has an entry for every stage"
        return plan(len(self._queue) - 1, self._queue[-1], legal, PlanStatus.UNMET)


def order(damage: np.ndarray, pages: np.ndarray, start: np.ndarray) -> Actions:
    """All reductions from ``start`` int64[n] down, greedy: always the next step with the least damage a page."""
    n, width = pages.shape
    # One contiguous row a width, the widest first.
    damage, pages, rows = np.ascontiguousarray(damage.T), np.ascontiguousarray(pages.T), np.arange(n)
    from_pages, from_damage = pages[start, rows], damage[start, rows]
    key, size = np.full((width - 1, n), np.inf), np.zeros((width - 1, n), np.int64)
    added, last = np.zeros((width - 1, n)), np.full(n, -np.inf)
    for k, to in enumerate(range(width - 2, -1, -1)):
        released, cost = from_pages - pages[to], damage[to] - from_damage
        legal = (to < start) & (released > 0)
        # A step that is cheaper than the one before it is taken right after it.
        last = np.where(legal, np.maximum(last, cost / np.maximum(released, 1)), last)
        key[k], size[k], added[k] = np.where(legal, last, np.inf), released, cost
        from_pages, from_damage = np.where(legal, pages[to], from_pages), np.where(legal, damage[to], from_damage)
    key = key.T.ravel()
    found = np.flatnonzero(np.isfinite(key))
    block, k = np.divmod(found[ascending(key[found])], max(width - 1, 1))
    return Actions(block, width - 2 - k, size[k, block], added[k, block])


def _after(level: np.ndarray, actions: Actions) -> np.ndarray:
    level = level.copy()
    np.minimum.at(level, actions.block, actions.to)
    return level

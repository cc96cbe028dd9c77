"""Quality classes: what a request demands of the precision of all blocks for as long as it runs.

``min_bits`` is a floor on every paged block, ``max_damage`` bounds the predicted damage a served token
(``BlockTable.total_damage``, in the units of the calibration's table). A request with a demand waits at the head of
the queue until the committed bits meet it: as soon as a plan that does fits beside the KV of what runs and all KV that
the request may need, that plan is asked for. While it runs, policies see the demand and no plan may break it; pressure
then falls to preemption. Nothing waits behind a promise that cannot be kept: what the budget can never hold is refused
when it is submitted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from planner import BlockTable, Plan, PlanStatus, fit
from pwjax.engine.requests import Request

# Every request of a job demands the same, as a rule; each answer takes several plans.
_SMALLEST: WeakKeyDictionary[BlockTable, dict["Demand", int | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Demand:
    """What several requests demand together: the highest ``min_bits`` (0: none) and the lowest ``max_damage``."""

    min_bits: int = 0
    max_damage: float | None = None

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Demand":
        """What ``requests`` demand together."""
        requests = list(requests)
        limits = [r.max_damage for r in requests if r.max_damage is not None]
        return cls(max((r.min_bits or 0 for r in requests), default=0), min(limits, default=None))

    def __bool__(self) -> bool:
        return self != Demand()

    def met(self, table: BlockTable, bits: np.ndarray) -> bool:
        """Whether ``bits`` int[n] are good enough."""
        return bool(bits.min() >= self.min_bits) and (
            self.max_damage is None or table.total_damage(bits) <= self.max_damage
        )

    def plan(self, table: BlockTable, capacity_pages: int) -> Plan | None:
        """The best static plan in ``capacity_pages`` that meets the demand, None where there is none."""
        floor = next((b for b in table.widths if b >= self.min_bits), None)
        if floor is None:
            return None
        plan = fit(table, capacity_pages, floor, cause="A waiting request demands it.")
        return plan if plan.status is PlanStatus.MET and self.met(table, plan.bits) else None

    def smallest_pages(self, table: BlockTable) -> int | None:
        """Fewest pages (to 1 in 256) of weights that meet the demand, None where no precision does."""
        known = _SMALLEST.setdefault(table, {})
        if self not in known:
            known[self] = self._smallest_pages(table)
        return known[self]

    def _smallest_pages(self, table: BlockTable) -> int | None:
        low, high = 0, int(table.pages.max(axis=1).sum())
        if self.plan(table, high) is None:
            return None
        while high - low > max(1, high // 256):
            middle = (low + high) // 2
            low, high = (low, middle) if self.plan(table, middle) else (middle, high)
        return high

    def allowed(self, table: BlockTable, now: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """bool[n]: which of the changes from ``now`` to ``wanted`` (int[n]) the demand allows.

        A demotion below ``min_bits`` is not; of the others, those that cost the least damage a page, as many as
        ``max_damage`` has room for. Promotions always are.
        """
        down = wanted < now
        ok = ~(down & (wanted < self.min_bits))
        if self.max_damage is None or not (down & ok).any():
            return ok
        rows = np.flatnonzero(down & ok)
        old, new = table.level(now)[rows], table.level(wanted)[rows]
        added = table.expected[rows, new] - table.expected[rows, old]
        order = np.argsort(added / np.maximum(table.pages[rows, old] - table.pages[rows, new], 1), kind="stable")
        room = self.max_damage - table.total_damage(now)
        ok[rows[order[np.cumsum(added[order]) > room]]] = False
        return ok

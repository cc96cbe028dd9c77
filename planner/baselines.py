"""Baselines behind the same interface: what each part of the default policy is worth."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from planner.damage import Prices, even_damage
from planner.default import DefaultPolicy
from planner.observe import Observation, Trigger, leaving
from planner.plan import Plan, PlanStatus
from planner.pressure import Thresholds
from planner.solve import fit, uniform
from planner.tables import BlockTable


class _Fixed:
    """A policy whose first plan stays."""

    damage_form: ClassVar[str | None] = None
    moves = False

    def step(self, o: Observation) -> Plan | None:
        """Nothing, ever."""
        return None


@dataclass
class StaticPolicy(_Fixed):
    """The best static plan under the reserve, never moved: offline mixed precision."""

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The best static plan that leaves the reserve."""
        return fit(table, capacity_pages - reserve_pages, cause=leaving(reserve_pages))


@dataclass
class UniformPolicy(_Fixed):
    """All blocks at ``bits`` (None: the widest that fits), never moved."""

    bits: int | None = None

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """All blocks at one width; ``TOO_SMALL`` where it does not leave the reserve."""
        room = capacity_pages - reserve_pages
        bits = self.bits
        if bits is None:
            ladder = uniform_widths(table)
            bits = max((b for b in ladder if table.total_pages(b) <= room), default=ladder[0])
        return uniform(table, bits, room, leaving(reserve_pages))


@dataclass
class UniformDynamicPolicy:
    """The default's trigger, but all blocks move together: what moving alone is worth, without choosing blocks."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    residence: int = 4
    damage_form: ClassVar[str | None] = None
    moves: ClassVar[bool] = True

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The widest single width that leaves the reserve."""
        self._table, self._ladder = table, uniform_widths(table)
        self._trigger = Trigger(capacity_pages, self.thresholds, self.residence)
        return UniformPolicy().initial(table, capacity_pages, reserve_pages)

    def step(self, o: Observation) -> Plan | None:
        """Down as many widths as the release needs; up one width when all of it fits."""
        pressure, before = self._trigger.read(o), np.array(o.bits)
        if pressure.release_pages:
            # A failed move can leave blocks at several widths: going down from the top evens them out.
            plans = [
                self._plan(o, np.minimum(before, width), pressure)
                for width in reversed(self._ladder)
                if width >= o.least(self._table)
            ] or [self._plan(o, before, pressure)]
            enough = (plan for plan in plans if plan.released_pages >= pressure.release_pages)
            most = max(plans, key=lambda plan: plan.released_pages)
            return next(enough, None) or replace(most, status=PlanStatus.UNMET)
        # Blocks that were given up never change again: the others go on without them.
        given_up = np.zeros_like(o.moving) if o.given_up is None else o.given_up
        left = before[~given_up]
        if pressure.spare_pages and not (o.moving & ~given_up).any() and len(left) and left.min() < self._ladder[-1]:
            wider = min(b for b in self._ladder if b > left.min())
            plan = self._plan(o, np.maximum(before, wider), pressure)
            if plan.moves and -plan.released_pages <= pressure.spare_pages:
                return plan
        return None

    def _plan(self, o: Observation, bits: np.ndarray, pressure) -> Plan:
        bits = np.where(o.moving, o.bits, bits)
        return Plan(self._table, np.array(o.bits), bits, cause=str(pressure))


class HotnessPolicy(DefaultPolicy):
    """Routing only: experts that are used more keep more bits, whatever precision does to them."""

    def __init__(self, **options):
        super().__init__(**{"sensitivity": False, "residual": False, **options})


@dataclass
class RandomPolicy(DefaultPolicy):
    """The default's mechanics on damage drawn at random: what choosing well is worth. ``seed`` draws it."""

    seed: int = 0

    def _prices(self, o: Observation | None = None) -> Prices:
        drawn = np.random.default_rng(self.seed).exponential(size=self._table.blocks)
        return Prices(even_damage(self._table, drawn))


def uniform_widths(table: BlockTable) -> list[int]:
    """Widths that all blocks could sensibly have together: those that no wider one undercuts in pages.

    Of tiny blocks, a wide LUT can take more pages than 16-bit rows do.
    """
    total = table.pages.sum(axis=0)
    return [b for i, b in enumerate(table.widths) if (total[i + 1 :] > total[i]).all()]

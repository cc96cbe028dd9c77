"""Policies: when to plan, and which plan. One interface for the default and for every baseline.

A policy is made once per engine, asked for an initial plan, then asked at every boundary. It is deterministic:
its only state is what it saw in earlier observations.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import numpy as np

from planner.floors import FloorRule
from planner.plan import Plan, PlanStatus
from planner.pressure import Pressure, Thresholds, measure
from planner.solve import demote, fit, promote, uniform
from planner.tables import BlockTable


@dataclass(frozen=True, eq=False)
class Observation:
    """What a policy sees at a boundary. Pages count weights and KV alike.

    ``bits`` int[n]: committed bits. ``moving`` bool[n]: blocks with a move in flight, which a plan leaves alone.
    ``free_pages``: pages that nobody owns or has reserved. ``growth_pages``: pages that the running sequences
    will need over the look-ahead. ``blocked_pages``: pages that were needed and could not be had, beyond growth.
    ``releasing_pages``: pages that demotions in flight will free. ``reserving_pages``: pages that promotions
    in flight have not yet taken from the free ones. ``routing_mass`` float[layers, experts] or None: recent
    router-weight share. ``boundary``: counts up. ``floor_bits``: no block may go below, whatever the stage, while
    requests run that ask for it. ``max_damage``: predicted damage that no plan may exceed, None: no limit.
    """

    bits: np.ndarray
    moving: np.ndarray
    free_pages: int
    growth_pages: int
    boundary: int
    routing_mass: np.ndarray | None = None
    blocked_pages: int = 0
    releasing_pages: int = 0
    reserving_pages: int = 0
    floor_bits: int = 0
    max_damage: float | None = None


class Policy(Protocol):
    """Decides bits. ``initial`` is called once, before any ``step``."""

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """Plan to start with in an arena of ``capacity_pages``, leaving ``reserve_pages`` for KV."""
        ...

    def step(self, observation: Observation) -> Plan | None:
        """Plan for this boundary, or None to leave everything as it is.

        Under pressure that no plan relieves, a plan that says ``UNMET`` (and may move nothing): the engine
        must then preempt or stop admitting.
        """
        ...


@dataclass
class Trigger:
    """When to act, shared by all dynamic policies so that comparisons differ in *what* moves only.

    Releases answer the headroom of this boundary. Promotions spend only what was spare at this boundary and
    at every one of the last ``residence``: memory that swings faster than that moves no weights up.
    """

    capacity_pages: int
    thresholds: Thresholds
    residence: int
    seen: dict[int, Pressure] = field(default_factory=dict)

    def read(self, o: Observation) -> Pressure:
        """Pages to release now, or pages that have been spare for long enough."""
        now = measure(
            self.capacity_pages,
            o.free_pages,
            o.growth_pages,
            o.blocked_pages,
            o.releasing_pages,
            o.reserving_pages,
            self.thresholds,
        )
        self.seen[o.boundary] = now
        # The window is watched in full once an entry is old enough to be its beginning.
        start = max((at for at in self.seen if at <= o.boundary - self.residence), default=None)
        if start is None:
            return replace(now, spare_pages=0)
        self.seen = {at: pressure for at, pressure in self.seen.items() if at >= start}
        return replace(now, spare_pages=min(pressure.spare_pages for pressure in self.seen.values()))


@dataclass
class DefaultPolicy:
    """Greedy and dynamic: the best static plan first, then the cheapest demotions and the best promotions.

    ``floors``: how low blocks may go, by damage and routing. ``residence``: boundaries for which pages must have
    been spare before they are spent, and which a promoted block waits before it is promoted again. ``ceiling``: the
    most pages that one plan may promote, as a fraction of the arena, but always enough for one block.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    floors: FloorRule = field(default_factory=FloorRule)
    residence: int = 16
    ceiling: float = 0.02

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The best static plan that leaves the reserve."""
        plan = fit(table, capacity_pages - reserve_pages, cause=_leaving(reserve_pages))
        self._table = table
        self._trigger = Trigger(capacity_pages, self.thresholds, self.residence)
        self._ceiling_pages = max(int(self.ceiling * capacity_pages), int(table.pages.max()))
        self._bits = plan.bits
        self._rests_until = np.full(table.blocks, np.iinfo(np.int64).min)
        return plan

    def step(self, o: Observation) -> Plan | None:
        """Demote when headroom is low, promote when it is ample and has been for a while."""
        table = self._table
        # Residence counts from the commit that was seen, not from the plan: a transfer may have failed.
        self._rests_until = np.where(o.bits > self._bits, o.boundary + self.residence, self._rests_until)
        self._bits = np.array(o.bits)
        pressure = self._trigger.read(o)
        if pressure.release_pages:
            least = table.widths[int(np.searchsorted(table.widths, o.floor_bits))]
            stages = [np.maximum(stage, least) for stage in self.floors.stages(table, o.routing_mass)]
            return demote(table, o.bits, pressure.release_pages, stages, o.moving, str(pressure))
        if pressure.spare_pages:
            resting = o.moving | (self._rests_until > o.boundary)
            plan = promote(table, o.bits, pressure.spare_pages, self._ceiling_pages, resting, str(pressure))
            return plan if plan.moves else None
        return None


@dataclass
class StaticPolicy:
    """The best static plan under the reserve, never moved: offline mixed precision."""

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The best static plan that leaves the reserve."""
        return fit(table, capacity_pages - reserve_pages, cause=_leaving(reserve_pages))

    def step(self, o: Observation) -> Plan | None:
        """Nothing, ever."""
        return None


@dataclass
class UniformPolicy:
    """All blocks at ``bits`` (None: the widest that fits), never moved."""

    bits: int | None = None

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """All blocks at one width; ``TOO_SMALL`` where it does not leave the reserve."""
        room = capacity_pages - reserve_pages
        bits = self.bits
        if bits is None:
            bits = max((b for b in table.widths if table.total_pages(b) <= room), default=table.widths[0])
        return uniform(table, bits, room, _leaving(reserve_pages))

    def step(self, o: Observation) -> Plan | None:
        """Nothing, ever."""
        return None


@dataclass
class UniformDynamicPolicy:
    """The default's trigger, but all blocks move together: what moving alone is worth, without choosing blocks."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    residence: int = 16

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The widest single width that leaves the reserve."""
        self._table = table
        self._trigger = Trigger(capacity_pages, self.thresholds, self.residence)
        return UniformPolicy().initial(table, capacity_pages, reserve_pages)

    def step(self, o: Observation) -> Plan | None:
        """Down as many widths as the release needs; up one width when all of it fits."""
        table = self._table
        pressure, before = self._trigger.read(o), np.array(o.bits)
        if pressure.release_pages:
            # A failed move can leave blocks at several widths: going down from the top evens them out.
            for width in reversed(table.widths):
                plan = Plan(table, before, np.where(o.moving, before, np.minimum(before, width)), cause=str(pressure))
                if plan.released_pages >= pressure.release_pages:
                    return plan
            return replace(plan, status=PlanStatus.UNMET)
        if pressure.spare_pages and not o.moving.any() and before.min() < table.widths[-1]:
            wider = min(b for b in table.widths if b > before.min())
            plan = Plan(table, before, np.maximum(before, wider), cause=str(pressure))
            if -plan.released_pages <= pressure.spare_pages:
                return plan
        return None


POLICIES = {
    "default": DefaultPolicy,
    "static": StaticPolicy,
    "uniform": UniformPolicy,
    "uniform-dynamic": UniformDynamicPolicy,
}


def get_policy(name: str, **options) -> Policy:
    """A new policy by name; ``options`` are its fields. ValueError lists the names, or the options it takes."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}")
    kind = POLICIES[name]
    allowed = [f.name for f in fields(kind)]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(
            f"policy {name!r} has no option {', '.join(unknown)}; it takes {', '.join(allowed) or 'no options'}"
        )
    return kind(**options)


def _leaving(reserve_pages: int) -> str:
    return f"Start: leave {reserve_pages} pages for KV."

"""What a policy sees and must answer, and the trigger that all dynamic policies share."""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from planner.plan import Plan
from planner.pressure import Pressure, Thresholds, measure
from planner.tables import BlockTable


@dataclass(frozen=True, eq=False)
class Observation:
    """What a policy sees at a boundary. Pages count weights and KV alike.

    ``bits`` int[n]: committed bits. ``moving`` bool[n]: blocks with a move in flight, and those given up, which a
    plan leaves alone. ``free_pages``: pages that nobody owns or has reserved. ``growth_pages``: pages that the running
    sequences will need over the look-ahead. ``blocked_pages``: pages that were needed and could not be had, beyond
    growth. ``releasing_pages``: pages that demotions in flight will free. ``reserving_pages``: pages that promotions
    in flight have not yet taken from the free ones. ``boundary``: counts up.

    ``routing_mass`` float[layers, experts] or None: recent router-weight share, any scale, and ``routing_choices``: how
    often experts were chosen; ``routing_tokens``: how many tokens both stand for, None: enough to be trusted.
    ``request_mass``: the mass of the running requests' prompts, averaged by their KV pages, and ``residual``: their
    features (see ``ResidualHeads.factor``), averaged so.
    ``given_up`` bool[n]: blocks that will never move again. ``tokens``: tokens served so far. ``turn_pages``: pages
    that one KV page more of one sequence takes, all layers together. ``floor_bits``: no block may go below,
    whatever the stage, while requests run that ask for it. ``max_damage``: predicted damage that no plan may exceed.
    """

    bits: np.ndarray
    moving: np.ndarray
    free_pages: int
    growth_pages: int
    boundary: int
    routing_mass: np.ndarray | None = None
    routing_choices: np.ndarray | None = None
    blocked_pages: int = 0
    releasing_pages: int = 0
    reserving_pages: int = 0
    floor_bits: int = 0
    max_damage: float | None = None
    routing_tokens: float | None = None
    request_mass: np.ndarray | None = None
    residual: np.ndarray | None = None
    given_up: np.ndarray | None = None
    tokens: int | None = None
    turn_pages: int = 1

    @property
    def headroom_pages(self) -> int:
        """Free pages once everything under way has landed and the running sequences have grown."""
        coming = self.releasing_pages - self.reserving_pages
        return self.free_pages + coming - self.growth_pages - self.blocked_pages

    def least(self, table: BlockTable) -> int:
        """The lowest width of ``table`` that ``floor_bits`` allows."""
        return next((b for b in table.widths if b >= self.floor_bits), table.widths[-1])


class Policy(Protocol):
    """Decides bits. ``initial`` is called once, before any ``step``.

    ``moves``: whether ``step`` may ever return a plan. ``damage_form``: the damage table it is defined on, None: the
    one that calibration found best.
    """

    damage_form: str | None

    @property
    def moves(self) -> bool:
        """Whether ``step`` may ever return a plan."""
        ...

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
            self.capacity_pages, o.free_pages, o.growth_pages, o.blocked_pages, o.releasing_pages, o.reserving_pages,
            self.thresholds,
        )  # fmt: skip
        self.seen[o.boundary] = now
        # The window is watched in full once an entry is old enough to be its beginning.
        start = max((at for at in self.seen if at <= o.boundary - self.residence), default=None)
        if start is None:
            return replace(now, spare_pages=0)
        self.seen = {at: pressure for at, pressure in self.seen.items() if at >= start}
        return replace(now, spare_pages=min(pressure.spare_pages for pressure in self.seen.values()))


def leaving(reserve_pages: int) -> str:
    """The cause of an initial plan."""
    return f"Start: leave {reserve_pages} pages for KV."

"""The default policy: the cheapest demotions when headroom is low, the best promotions when it stays ample."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from planner.damage import PSEUDO_CHOICES, Prices, price
from planner.floors import FloorRule
from planner.observe import Observation, Trigger, leaving
from planner.plan import Plan
from planner.pressure import Thresholds
from planner.solve import demote, fit, promote
from planner.tables import BlockTable


@dataclass
class DefaultPolicy:
    """Greedy and dynamic: the best static plan first, then the cheapest demotions and the best promotions.

    ``floors``: how low blocks may go, by damage and routing; ``depth``: widths that one plan may take from a block,
    given up in a stage before its floors are (None: any). ``residence``: boundaries for which pages must have been
    spare before they are spent, and which a promoted block waits before it is promoted again. ``ceiling``: the most
    pages that one plan may promote, as a fraction of the arena, but always enough for one block; ``token_ceiling``:
    the same fraction that each served token adds to what may be promoted. ``pseudo_choices``: choices of an average
    expert that calibration's routing counts against the running one; ``strength`` of the prompt residual.

    ``sensitivity``, ``routing``, ``residual`` and ``movement`` take one layer away each, for ablations: without
    ``sensitivity`` all weights are alike, without ``movement`` the first plan stays.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    floors: FloorRule = field(default_factory=FloorRule)
    depth: int | None = None
    residence: int = 4
    ceiling: float = 0.02
    token_ceiling: float = 0.0005
    pseudo_choices: float = PSEUDO_CHOICES
    strength: float = 1.0
    sensitivity: bool = True
    routing: bool = True
    residual: bool = True
    movement: bool = True
    damage_form: ClassVar[str | None] = None

    @property
    def moves(self) -> bool:
        """Whether it plans after the start."""
        return self.movement

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The best static plan that leaves the reserve, on calibration's floors if they fit."""
        room = capacity_pages - reserve_pages
        self._table = table
        prices = self._prices()
        floors = table.floors if table.floors is not None and table.total_pages(table.floors) <= room else None
        plan = fit(table, room, floors, leaving(reserve_pages), prices=prices)
        self._trigger = Trigger(capacity_pages, self.thresholds, self.residence)
        self._capacity_pages = capacity_pages
        self._ceiling_pages = max(int(self.ceiling * capacity_pages), int(table.pages.max()))
        self._credit_pages, self._tokens = float(self._ceiling_pages), 0
        self._bits = plan.bits
        self._rests_until = np.full(table.blocks, np.iinfo(np.int64).min)
        return plan

    def step(self, o: Observation) -> Plan | None:
        """Demote when headroom is low, promote when it is ample and has been for a while."""
        if not self.movement:
            return None
        table = self._table
        # Residence counts from the commit that was seen, not from the plan: a transfer may have failed.
        self._rests_until = np.where(o.bits > self._bits, o.boundary + self.residence, self._rests_until)
        self._bits = np.array(o.bits)
        pressure, allowed_pages = self._trigger.read(o), self._allowed(o)
        if pressure.release_pages:
            prices = self._prices(o)
            stages = [np.maximum(stage, o.least(table)) for stage in self.floors.stages(table, prices.damage)]
            return demote(
                table, o.bits, pressure.release_pages, stages, o.moving, str(pressure),
                prices=prices, depth=self.depth, max_damage=o.max_damage,
            )  # fmt: skip
        if pressure.spare_pages:
            resting = o.moving | (self._rests_until > o.boundary)
            plan = promote(
                table, o.bits, pressure.spare_pages, allowed_pages, resting, str(pressure), prices=self._prices(o)
            )
            self._credit_pages += min(plan.released_pages, 0)
            return plan if plan.moves else None
        return None

    def _allowed(self, o: Observation) -> int:
        """Pages that may be promoted now: served tokens fill a bucket that promotions empty."""
        if o.tokens is None:
            return self._ceiling_pages
        served, self._tokens = o.tokens - self._tokens, o.tokens
        earned = self._credit_pages + served * self.token_ceiling * self._capacity_pages
        self._credit_pages = min(earned, float(self._ceiling_pages))
        return int(self._credit_pages)

    def _prices(self, o: Observation | None = None) -> Prices:
        routing = o.routing_choices if o and self.routing else None
        features = o.residual if o and self.residual else None
        tokens = o.routing_tokens if o else None
        return price(
            self._table, routing, tokens, features,
            pseudo_choices=self.pseudo_choices, strength=self.strength, sensitivity=self.sensitivity,
        )  # fmt: skip

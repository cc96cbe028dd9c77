"""The moment between two dispatches, the only place where precision changes: policy, pager and callbacks in one order.

::

    stats      routing of the dispatches since the last boundary
    pressure   what is free, what running sequences will need, what could not be had
    plan       the policy's answer, which becomes the desired bits of the blocks it moves
    stage      copies that have landed, failed or were started
    commit     landed pages are written, one new epoch
    retire     pages that no table names are free

A callback is called once for each of the six, every boundary. It may call ``engine.apply`` (a plan asked for before
``stage`` is in the queue of this very boundary), and must not step the engine. The last three tell what the pager
did, after it did it: pages move in one call.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner import Observation, Plan
from pwjax.engine.decisions import Asked
from pwjax.engine.eviction import Market
from pwjax.engine.parts import Parts, Snapshot
from pwjax.engine.quality import Demand
from pwjax.engine.routing import RoutingRecord
from pwjax.engine.scheduler import Scheduler
from pwjax.engine.sequence import Sequence
from pwjax.errors import PWJaxError
from pwjax.memory import BoundaryReport

PHASES = ("stats", "pressure", "plan", "stage", "commit", "retire")
# Boundaries over which the growth of running sequences counts as pressure: demotions must land before KV runs out.
LOOKAHEAD_BOUNDARIES = 8


@dataclass(frozen=True)
class Boundary:
    """What a callback is told. ``phase`` is one of :data:`PHASES`; a field is None until its phase has come.

    ``index`` counts boundaries; ``routing_mass`` float64[L, E], recent router-weight shares (``stats``); ``snapshot``
    what plans are made from (``pressure``); ``plan`` the policy's plan or None (``plan``); ``report`` what the pager
    did (``stage``, ``commit``, ``retire``).
    """

    index: int
    phase: str
    routing_mass: np.ndarray
    snapshot: Snapshot | None = None
    plan: Plan | None = None
    report: BoundaryReport | None = None


Callback = Callable[[Boundary], None]


class Boundaries:
    """Runs boundaries for an engine and keeps what outlives one: index, routing, lowest bits, last failure.

    ``frozen``: no policy plans; precision then changes only by :meth:`request`.
    """

    def __init__(self, parts: Parts, scheduler: Scheduler):
        self.parts, self.scheduler = parts, scheduler
        self.index = 0
        self.frozen = not parts.moves
        self.callbacks: list[Callback] = []
        self.routing = RoutingRecord(parts.table)
        self.mean_bits = self.lowest_bits = parts.table.mean_bits(parts.start_bits)
        self.last_failure: str | None = None
        # Boundary of the plan that each block last moved for, and what the last records of the log said.
        self._planned_at = np.zeros(parts.table.blocks, np.int64)
        self._logged_blocked_pages = 0
        self._logged_turn: tuple = ()
        self._committed = False
        self._market = Market(parts, scheduler.prefixes)
        # Whether all that the pager has left are moves that wait for free pages.
        self.starved = False
        scheduler.ready = lambda sequence: Demand.of([sequence.request]).met(parts.table, parts.pager.committed)
        # The waiting sequence for which precision is being raised.
        self._raising: Sequence | None = None
        scheduler.epoch = parts.page_table.epoch

    def run(self, settling: bool = False) -> None:
        """One boundary: let the policy plan (not while ``settling`` or frozen), and the pager commit."""
        pager, decisions = self.parts.pager, self.parts.decisions
        self.index += 1
        self._committed = False
        told = self._tell(Boundary(self.index, "stats", self.routing.shares)) if self.callbacks else None
        planning = not (settling or self.frozen)
        if planning and self.scheduler.blocked_pages:
            pager.cancel_promotions()
        snapshot = self.observe() if told or planning else None
        told = told and self._tell(replace(told, phase="pressure", snapshot=snapshot))
        plan = demanded = self._demanded() if planning and decisions.live else None
        if plan is None:
            plan = decisions.plan(snapshot.observation) if planning and snapshot else None
            if plan is not None and plan.released_pages < 0 and self.scheduler.blocked_pages:
                # Cached prefixes count as free, what takes pages first are moves: a request that waits would starve.
                plan = None
        if plan is not None and (plan.moves or plan is demanded):
            if plan is not demanded and plan.released_pages < 0 and pager.demoting:
                self._withdraw_demotions(plan)
            self.request(plan)
        for asked in decisions.asked(self.index, late=False):
            self.ask("plan", asked)
        told = told and self._tell(replace(told, phase="plan", plan=plan))
        self._evict()
        report = BoundaryReport(self.index, self.parts.page_table.epoch)
        if not pager.idle or not self.frozen:
            report = self.commit(idle=settling or not any(self.scheduler.slots))
        self._committed = True
        self.scheduler.epoch = self.parts.page_table.epoch
        for asked in decisions.asked(self.index, late=True):
            self.ask("plan", asked)
        for phase in PHASES[3:]:
            told = told and self._tell(replace(told, phase=phase, report=report))

    def commit(self, idle: bool) -> BoundaryReport:
        """Let the pager collect, commit and start copies; keep count and log. ``idle``: no sequence is held up."""
        parts = self.parts
        growth = self.scheduler.growth_pages(parts.shapes.decode_tokens)
        urgent = self.scheduler.blocked_pages > 0 or growth > parts.allocator.free_pages
        report = parts.pager.boundary(self.index, parts.decisions.outcome(self.index), urgent=urgent, idle=idle)
        self.starved = bool(report.blocked_pages) and not self.parts.pager.moving.any()
        self.parts.meter.observe()
        if report.failed:
            self.last_failure = report.failed[-1][1]
        if report.landed or report.failed or report.started or report.blocked_pages != self._logged_blocked_pages:
            self._logged_blocked_pages = report.blocked_pages
            self.log(
                "transfers", landed=report.landed, failed=report.failed, given_up=report.given_up,
                started=report.started, blocked_pages=report.blocked_pages, queued=report.queued,
            )  # fmt: skip
        if report.committed:
            self.mean_bits = parts.table.mean_bits(parts.pager.committed)
            self.lowest_bits = min(self.lowest_bits, self.mean_bits)
            changes = [
                [c.block, c.from_bits, c.to_bits, c.written_pages, c.freed_pages, int(self._planned_at[c.block])]
                for c in report.committed
            ]
            pages = sum(c.written_pages for c in report.committed)
            self.log(
                "commit", epoch=report.epoch, changes=changes, bytes=pages * self.parts.memory.page_bytes,
                mean_bits=round(self.mean_bits, 4),
            )  # fmt: skip
        return report

    def settle(self, timeout_s: float) -> None:
        """Run boundaries without a policy until no move is left; PWJaxError after ``timeout_s`` seconds."""
        began = time.monotonic()
        while not self.parts.pager.idle:
            self.run(settling=True)
            if time.monotonic() - began > timeout_s:
                raise PWJaxError(f"precision moves did not finish within {timeout_s:g} seconds")
            time.sleep(0.0005)

    def request(self, plan: Plan, kind: str = "plan") -> None:
        """Make the plan's own changes the desired bits, and log them.

        A plan that moves nothing by itself (a static one) asks for all of its bits. Left alone are blocks that it
        does not change, blocks that are moving or given up, and blocks that have other bits by now than those it was
        made from: an old plan undoes nobody's moves.
        """
        pager, table = self.parts.pager, self.parts.table
        committed = pager.committed
        own = plan.before != plan.bits if plan.moves else committed != plan.bits
        stale = own & (plan.before != committed) if plan.moves else np.zeros_like(own)
        own &= ~(self.pending() | stale)
        own &= self.demand.allowed(table, pager.desired, np.where(own, plan.bits, pager.desired))
        asked = Plan(table, committed, np.where(own, plan.bits, committed))
        # In the plan's own order of blocks; the pager puts demotions first.
        changes = tuple((c.block, c.from_bits, c.to_bits) for c in asked.changes())
        record = {
            "cause": plan.cause, "status": plan.status.name, "stage": plan.stage,
            "released_pages": asked.released_pages, "stale": int(stale.sum()), "damage": asked.damage,
            "mean_bits": round(table.mean_bits(asked.bits), 4),
        }  # fmt: skip
        if self._committed and kind == "plan":
            record["late"] = True  # by a callback after the pager had its turn
        self.ask(kind, Asked(changes, record))

    def _withdraw_demotions(self, plan: Plan) -> None:
        """Take back demotions that have not landed: ``plan`` promotes, and they would go before all of it.

        They answered a pressure that is over, and its promotions leave blocks alone that still wait to go down.
        """
        self.ask("plan", Asked((), {"cause": plan.cause, "withdrawn": True}))

    def ask(self, kind: str, asked: Asked) -> None:
        """Make ``asked`` the desired bits of its blocks, and log it; ``withdrawn`` demotions are dropped first."""
        pager = self.parts.pager
        if asked.record.get("withdrawn"):
            pager.cancel_demotions()
        wanted, blocks = pager.desired.copy(), [block for block, _, _ in asked.changes]
        wanted[blocks] = [to for _, _, to in asked.changes]
        pager.request(wanted, blocks)
        self._planned_at[blocks] = self.index
        self.log(kind, **asked.record, changes=asked.changes)

    @property
    def demand(self) -> Demand:
        """What the running requests demand of all blocks, and the waiting one for which precision is raised."""
        waiting = self.scheduler.waiting
        if not waiting or waiting[0] is not self._raising:
            self._raising = None
        raising = [self._raising] if self._raising else []
        return Demand.of(s.request for s in (*self.scheduler.running, *raising))

    def _demanded(self) -> Plan | None:
        """A plan for the first waiting request, where it is held by its demand and such a plan fits."""
        parts, scheduler = self.parts, self.scheduler
        if not scheduler.held or not scheduler.waiting or not parts.pager.idle:
            return None
        first = scheduler.waiting[0]
        demand = Demand.of(s.request for s in (*scheduler.running, first))
        # What runs may go on growing, and all KV of the request fits once it runs: its demand will not be broken.
        kv_pages = parts.kv.used_pages - scheduler.prefixes.evictable_pages + parts.kv.pages_for(first.max_total)
        kv_pages += scheduler.growth_pages(LOOKAHEAD_BOUNDARIES * parts.shapes.decode_tokens)
        plan = demand.plan(parts.table, parts.memory.capacity_pages - kv_pages)
        self._raising = first if plan is not None else None
        return plan

    def prices(self) -> tuple[float, float]:
        """Damage a page of dropping cached prefixes, and of the cheapest demotion (infinite: none is possible)."""
        demotion = math.inf
        if not self.frozen:
            demotion = self._market.demotion(self.index, self.routing, self.pending(), self.demand.min_bits)
        return self._market.prefix, demotion

    def _evict(self) -> None:
        """Drop cached prefixes for pages that are wanted and not free, where that costs less than precision."""
        parts, scheduler = self.parts, self.scheduler
        if not parts.decisions.live:
            record = parts.decisions.evicted(self.index)
            if record is not None:
                scheduler.prefixes.evict(prefixes=record["prefixes"])
                self.log("evict", **record)
            return
        if not scheduler.prefixes.evictable_pages:
            return
        wanted = scheduler.growth_pages(LOOKAHEAD_BOUNDARIES * parts.shapes.decode_tokens) + scheduler.blocked_pages
        wanted += parts.pager.reserving_pages - parts.pager.releasing_pages - parts.allocator.free_pages
        if wanted <= 0:
            return
        prefix, demotion = self.prices()
        if prefix <= demotion:
            gone, pages = scheduler.prefixes.evict(wanted)
            other = None if demotion == math.inf else demotion
            self.log("evict", prefixes=gone, pages=pages, price=prefix, demotion=other)

    def pending(self) -> np.ndarray:
        """bool[n]: blocks with a move queued or in flight, and those given up: a plan leaves them alone."""
        pager = self.parts.pager
        return pager.moving | pager.given_up | (pager.desired != pager.committed)

    def observe(self) -> Snapshot:
        """The state that plans are made from; pages count weights and KV alike.

        Pages of cached prefixes that cost less than precision count as free: they are, once something needs them.
        """
        parts, cached = self.parts, self.scheduler.prefixes.evictable_pages
        if cached:
            prefix, demotion = self.prices()
            cached = cached if prefix <= demotion else 0
        demand = self.demand
        request_mass, residual = self.routing.prompts(self.scheduler.running, parts.kv)
        observation = Observation(
            bits=parts.pager.committed,
            moving=self.pending(),
            free_pages=parts.allocator.free_pages + cached,
            growth_pages=self.scheduler.growth_pages(LOOKAHEAD_BOUNDARIES * parts.shapes.decode_tokens),
            boundary=self.index,
            routing_mass=self.routing.mass,
            routing_choices=self.routing.choices,
            routing_tokens=self.routing.tokens,
            request_mass=request_mass,
            residual=residual,
            given_up=parts.pager.given_up,
            tokens=parts.meter.prefill.tokens + parts.meter.decode.tokens,
            turn_pages=parts.kv.pages_for(1),
            blocked_pages=self.scheduler.blocked_pages,
            releasing_pages=parts.pager.releasing_pages,
            reserving_pages=parts.pager.reserving_pages,
            floor_bits=demand.min_bits,
            max_damage=demand.max_damage,
        )
        return Snapshot(parts.table, observation, parts.memory.page_bytes)

    def log(self, kind: str, **fields) -> None:
        """Write a record of this boundary to the epoch log."""
        state = {"boundary": self.index, "free_pages": self.parts.allocator.free_pages}
        self.parts.log.write({"kind": kind, **state, "kv_pages": self.parts.kv.used_pages, **fields})

    def log_turn(self, prefill: list[int] | None, limits: list[int]) -> None:
        """A ``boundary`` record where a turn differs from the last one logged: dispatches, bits, 1 % of the pages."""
        parts = self.parts
        kv_step = max(1, parts.memory.num_pages // 100)
        mean_bits = round(self.mean_bits, 4)
        turn = (prefill, limits, mean_bits, parts.kv.used_pages // kv_step)
        if turn == self._logged_turn:
            return
        self._logged_turn = turn
        weights_pages = int(parts.table.total_pages(parts.pager.committed))
        self.log("boundary", mean_bits=mean_bits, weights_pages=weights_pages, prefill=prefill, decode=limits)

    def _tell(self, boundary: Boundary) -> Boundary | None:
        """Call the callbacks; None where there are none, so that nothing is computed for nobody."""
        for callback in self.callbacks:
            callback(boundary)
        return boundary if self.callbacks else None

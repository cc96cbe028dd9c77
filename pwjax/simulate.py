"""What-if: the engine's own loop, scheduler, KV pages, pager and policy over a trace, without weights or steps.

A simulated copy lands at the next boundary, and is committed when the pace of moves allows it: programs and pages take
about the time that they take an engine. An unknown prompt routes as calibration text did, and every request generates
all of its tokens. Prompts are drawn as for an engine, so none begin alike. The rest is the code that an engine runs, so
pages are counted as it counts them.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pwjax.engine.budget import page_table_bytes, program_name
from pwjax.engine.decisions import Live
from pwjax.engine.engine import Engine
from pwjax.engine.eviction import default_damage_per_ms
from pwjax.engine.log import EpochLog
from pwjax.engine.meter import Meter
from pwjax.engine.parts import Parts
from pwjax.engine.routing import RoutingRecord
from pwjax.engine.sequence import Sequence
from pwjax.engine.steps import Sampled
from pwjax.engine.trace import Arrival, run_trace
from pwjax.loading import Outlook
from pwjax.memory import KVPages, PageAllocator, Pager, PageTableState, Prefixes
from pwjax.memory.arena import COMMIT_WIDTHS
from pwjax.memory.transfer import StagedPages, TransferJob
from pwjax.run_summary import sparkline

# What a page takes in a commit, and its copy from steps: some work of its own, and the memory that it passes through.
PAGE_S, PAGE_BYTES_S = 3e-5, 2e9


@dataclass
class Simulation:
    """What a trace would do. ``timeline``: rows of step, mean bits, KV pages and free pages, one a step."""

    steps: int = 0
    finished: int = 0
    refused: int = 0
    preemptions: int = 0
    demotions: int = 0
    promotions: int = 0
    peak_bytes: int = 0
    budget_bytes: int = 0
    peak_pages: int = 0
    kv_peak_pages: int = 0
    timeline: list[tuple[int, float, int, int]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the range of the bits beside the timeline."""
        bits = [row[1] for row in self.timeline]
        ends = {"mean_bits_start": bits[0], "mean_bits_min": min(bits), "mean_bits_end": bits[-1]} if bits else {}
        return {**self.__dict__, **ends}

    def render(self) -> str:
        """As text, with the course of bits and pages."""
        found = self.to_json()
        lines = [
            f"trace     {self.finished:,} requests in {self.steps:,} steps, {self.refused} refused, "
            f"{self.preemptions} preemptions",
            f"peak      {self.peak_bytes:,} of {self.budget_bytes:,} bytes; {self.peak_pages:,} pages, "
            f"{self.kv_peak_pages:,} of them KV at most",
            f"moves     {self.demotions} demotions, {self.promotions} promotions",
        ]
        if self.timeline:
            at = np.array([row[0] for row in self.timeline])
            bits = (found[f"mean_bits_{name}"] for name in ("start", "min", "end"))
            lines.append("bits      {:.2f} at the start, {:.2f} at the lowest, {:.2f} at the end".format(*bits))
            for column, name in ((1, "bits"), (2, "KV pages"), (3, "free pages")):
                values = np.array([row[column] for row in self.timeline], float)
                lines.append(f"          {sparkline(at, values)} {name}, {values.min():g} to {values.max():g}")
        return "\n".join(lines)


def simulate(
    view: Outlook, arrivals: list[Arrival], step_s: float = 0.02, page_s: float | None = None
) -> Simulation:
    """Run a trace under the budget and policy of ``view``, which must fit; once a view.

    ``step_s``: seconds of a program, ``page_s``: of moving a page (None: after its size; 0: moves are not paced).
    """
    if page_s is None:
        page_s = PAGE_S + view.memory.page_bytes / PAGE_BYTES_S
    engine = simulated_engine(view, step_s=step_s, page_s=page_s)
    parts, result = engine.parts, Simulation(budget_bytes=view.memory.budget_bytes)

    def watch(step: int) -> None:
        bits = parts.table.mean_bits(parts.pager.committed)
        result.timeline.append((step, bits, parts.kv.used_pages, parts.allocator.free_pages))

    done = run_trace(engine, arrivals, watch)
    result.steps = len(result.timeline)
    result.refused = sum(completion.finish_reason == "refused" for completion in done)
    result.finished = len(done) - result.refused
    result.preemptions = engine.scheduler.preemptions
    result.demotions, result.promotions = parts.pager.counters.demotions, parts.pager.counters.promotions
    result.peak_bytes = parts.meter.peak_bytes
    result.peak_pages, result.kv_peak_pages = parts.allocator.peak_pages, parts.kv.peak_pages
    return result


def simulated_engine(
    view: Outlook, token_ms: float = 0.0, damage_per_ms: float | None = None, step_s: float = 0.0, page_s: float = 0.0
) -> Engine:
    """An engine without weights, for :func:`simulate` and experiments; once a view.

    ``token_ms``: what a prompt's token is taken to need, for the price of evicting it; ``damage_per_ms`` as in
    :func:`pwjax.load`; ``step_s`` and ``page_s`` as in :func:`simulate`.
    """
    time = _Time(step_s, page_s)
    parts = _parts(view, time)
    if damage_per_ms is not None:
        parts = parts._replace(damage_per_ms=damage_per_ms)
    return _SimulatedEngine(parts, view.running_bytes, token_ms, time)


class _Time:
    """The clock of a simulation: programs and pages let time pass."""

    def __init__(self, step_s: float, page_s: float):
        self.step_s, self.page_s, self.now_s = step_s, page_s, 0.0

    def __call__(self) -> float:
        return self.now_s

    def step(self) -> None:
        self.now_s += self.step_s

    def commit(self, pages: int) -> None:
        self.now_s += pages * self.page_s


def _parts(view: Outlook, time: _Time) -> Parts:
    """An engine's parts: bookkeeping is real, whatever would hold weights or do arithmetic is not."""
    shapes, memory, table, config = view.shapes, view.memory, view.plan.table, view.shapes.config
    # They stand in for an arena and a transfer, of which only this much is used.
    arena: Any = _NoArena(shapes.geometry.page_words, time)
    transfer: Any = _NextBoundary(shapes.geometry.page_words, time)
    allocator = PageAllocator(memory.num_pages)
    page_table = PageTableState(config.num_layers, config.num_experts, shapes.geometry)
    pager = Pager(
        arena, allocator, page_table, shapes.geometry, transfer,
        staging_pages=memory.staging_pages, clock=time,
    )  # fmt: skip
    page_table_size = page_table_bytes(config, shapes.geometry)
    meter = _Predicted(held_bytes=memory.dense_bytes + memory.arena_bytes + page_table_size, pager=pager)
    pager.load_initial(view.plan.bits, lambda *_: meter.observe())
    kv = KVPages(allocator, shapes.kv_kinds, shapes.slots)
    meter.held_bytes += memory.table_bytes - 2 * page_table_size
    stub: Any = SimpleNamespace(close=lambda: None)
    return Parts(
        shapes=shapes, memory=memory, table=table, params={}, programs={}, arena=arena, allocator=allocator, kv=kv,
        page_table=page_table, pager=pager, transfer=transfer, store=stub, policy=view.policy,
        decisions=Live(view.policy), tokenizer=None, meter=meter,
        log=EpochLog(None, {}), start_bits=view.plan.bits, moves=view.moves, seed=0,
        prefixes=Prefixes(kv, shapes.chunks[-1]), damage_per_ms=default_damage_per_ms(table),
        shadow=0.0,
    )  # fmt: skip


class _SimulatedEngine(Engine):
    def __init__(self, parts: Parts, running_bytes: dict[str, int], token_ms: float, time: _Time):
        super().__init__(parts)
        self._dispatcher = _NoDispatches(parts, running_bytes, token_ms, time)  # pyright: ignore[reportAttributeAccessIssue]
        self.boundaries.routing = _AsCalibrated(parts.table)


class _AsCalibrated(RoutingRecord):
    def add(self, stats, sequence=None) -> None:
        """Nothing is known of what a prompt of a trace routes to."""


class _NoDispatches:
    """Advances sequences as ``Dispatcher`` would."""

    def __init__(self, parts: Parts, running_bytes: dict[str, int], token_ms: float, time: _Time):
        self._parts, self._running_bytes, self._token_ms, self._time = parts, running_bytes, token_ms, time
        config = parts.shapes.config
        self._token = next(i for i in range(config.vocab_size) if i not in config.eos_token_ids)

    def prefill(self, sequence: Sequence):
        meter = self._parts.meter
        self._time.step()
        self._parts.kv.copies.clear()
        bucket, count = self._parts.shapes.cut(sequence.prefill_target - sequence.kv_tokens)
        meter.observe(self._running_bytes[program_name(("prefill", bucket))])
        meter.prefill.tokens += count
        meter.prefill.seconds += count * self._token_ms / 1000
        sequence.kv_tokens += count
        return self._sampled(np.ones((1, 1), bool)), None

    def decode(self, running, limits):
        meter, steps = self._parts.meter, self._parts.shapes.decode_tokens
        self._time.step()
        live = np.arange(steps)[:, None] < np.array(limits)
        meter.observe(self._running_bytes[program_name(("decode", steps))])
        for slot, sequence in enumerate(running):
            if sequence is not None:
                fed = int(live[:, slot].sum())
                meter.decode.tokens += fed
                sequence.kv_tokens += fed
        return self._sampled(live), None

    def _sampled(self, live: np.ndarray) -> Sampled:
        none: Any = None
        token: Any = np.full(live.shape, self._token)
        return Sampled(token=token, logprob=none, top_ids=none, top_logprobs=none, live=live)  # pyright: ignore


class _NoArena:
    """Takes commits and keeps nothing."""

    page_widths = COMMIT_WIDTHS

    def __init__(self, page_words: int, time: _Time):
        self.page_words, self._time = page_words, time
        self.array = SimpleNamespace(is_deleted=lambda: False, delete=lambda: None)

    def commit_pages(self, ids, words) -> None:
        self._time.commit(len(ids))

    def wait(self) -> None:
        pass


class _NextBoundary:
    """Copies that have always landed by the next boundary."""

    def __init__(self, page_words: int, time: _Time):
        self._page_words, self._time = page_words, time

    def submit(self, job: TransferJob):
        shapes = [(width, self._page_words) for width in job.chunks]
        # Views of one word: their shape is looked at, their contents go nowhere.
        words: Any = tuple(np.broadcast_to(np.uint32(0), shape) for shape in shapes)
        staged = StagedPages(words, len(job.pages), taken_s=len(job.pages) * self._time.page_s)
        return SimpleNamespace(done=lambda: True, result=lambda: staged, cancel=lambda: None)

    def close(self) -> None:
        pass


@dataclass
class _Predicted(Meter):
    """Counts what would be alive in place of what is: the same parts, of the sizes in the memory plan."""

    held_bytes: int = 0
    pager: Pager | None = None

    def observe(self, program_bytes: int = 0) -> None:
        pager = self.pager
        staged = pager.staged_pages * pager.geometry.page_bytes if pager else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + staged + program_bytes)

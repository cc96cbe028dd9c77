"""Text scored through the engine while a KV cache grows beside it, so that precision moves as it does in serving.

A trace says how many tokens other sequences hold in KV pages at every boundary. These sequences are ghosts: they take
real pages of the real arena, count as growth for the policy, and nothing is computed for them. The text advances with
the trace, as one sequence of the batch would, and each of its chunks is scored at the bits in force then. Where pages
are not free, trace and text both stand still until precision has given way, so every policy is asked about the same
tokens at the same pressure::

    text     |----chunk----|----chunk----|     one window; all of it is scored
    ghosts   |n |n |n |n |n |n |n |n |n |n     n tokens more a boundary, as a decode dispatch gives
    policy   ^  ^  ^  ^  ^  ^  ^  ^  ^  ^      a boundary: plan, stage, commit

Copies land at the next boundary and take no time, as in :mod:`pwjax.simulate`: results depend on the settings alone.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.dispatch import Dispatcher
from pwjax.engine.engine import Engine
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.engine.sequence import Sequence as Running
from pwjax.engine.trace import Arrival, read_trace
from pwjax.errors import BudgetError, PWJaxError, UsageError
from pwjax.evaluate.scorer import Scored
from pwjax.loading import DECODE_TOKENS, Injected, Outlook, Report, load, outlook
from pwjax.memory.transfer import SyncTransfer
from pwjax.units import format_bytes, parse_bytes

# Tokens of text a dispatch: the bits are those of its last boundary.
CHUNK = 32
# Boundaries in which nothing moves and pages still lack, after which a ghost leaves.
PATIENCE = 4


@dataclass(frozen=True)
class KVTrace:
    """Sequences beside the text: ``arrivals`` in boundaries from the start, which grow until they have all tokens.

    ``alike`` sequences in place of arrivals: a batch of that many, the text one of them, which all begin with a window
    and grow with it.
    """

    arrivals: tuple[Arrival, ...] = ()
    alike: int = 1

    @classmethod
    def parse(cls, text: str) -> "KVTrace":
        """A whole number is ``alike``, anything else a file as :func:`pwjax.engine.trace.read_trace` takes it.

        UsageError.
        """
        if text.lstrip("-").isdigit():
            if int(text) < 1:
                raise UsageError(f"--kv-trace must be a batch of at least 1 sequence or a file, got {text}")
            return cls(alike=int(text))
        if not os.path.exists(text):
            raise UsageError(f"--kv-trace must be a number of sequences or a JSONL file of arrivals, got {text!r}")
        return cls(tuple(read_trace(text, step_ms=1.0)))

    def of_window(self, length: int) -> tuple[Arrival, ...]:
        """What runs beside a window of ``length`` tokens where the batch begins with it."""
        return (Arrival(0, 0, length),) * (self.alike - 1)

    @property
    def boundaries(self) -> int:
        """Boundaries after which the arrivals come again."""
        return max((_end(a) for a in self.arrivals), default=0)

    def most(self, window: int) -> list[list[int]]:
        """Tokens of each ghost, at every boundary at which one begins or just before one ends."""
        arrivals = self.arrivals or self.of_window(window)
        moments = sorted({a.at_step for a in arrivals} | {_end(a) - 1 for a in arrivals})
        return [[_tokens(a, t) for a in arrivals if a.at_step <= t < _end(a)] for t in moments]


def _end(arrival: Arrival) -> int:
    """Boundary at which an arrival is gone."""
    return arrival.at_step + max(1, ceil(arrival.max_tokens / DECODE_TOKENS))


def _tokens(arrival: Arrival, boundary: int) -> int:
    """Tokens that an arrival holds once the dispatch of ``boundary`` has its pages."""
    grown = (boundary - arrival.at_step + 1) * DECODE_TOKENS
    return arrival.prompt_tokens + min(grown, arrival.max_tokens)


@dataclass
class Course:
    """What a run under a trace saw. ``timeline``: tokens of text so far, mean bits, KV pages and free pages, a row a
    chunk; ``stalled``: boundaries at which pages were lacking; ``dropped``: ghosts that had to leave early."""

    boundaries: int = 0
    stalled: int = 0
    dropped: int = 0
    timeline: list[tuple[int, float, int, int]] = field(default_factory=list)


class PressureScorer:
    """Scores windows under ``trace``; a context manager that frees the device. Make one with :meth:`load`.

    ``engine`` is an engine of its own, ``course`` what happened so far.
    """

    def __init__(self, engine: Engine, trace: KVTrace, window: int):
        self.engine, self.trace, self.window, self.course = engine, trace, window, Course()
        self._dispatcher = Dispatcher(engine.parts)
        self._ghosts: list[tuple[Arrival, Running]] = []
        self._waiting: list[Arrival] = []
        self._boundary = self._order = 0

    @classmethod
    def load(
        cls,
        artifact: Artifact,
        memory_budget: int | str | None,
        trace: KVTrace,
        *,
        window: int,
        bits: int | np.ndarray | None = None,
        policy: str = "default",
        kv_dtype: str = "bfloat16",
        report: Report | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "PressureScorer":
        """An engine with a slot for the text and one for every ghost that runs at a time. BudgetError, UsageError."""
        longest = max((a.prompt_tokens + a.max_tokens for a in trace.arrivals), default=0)
        context = max(window, longest)
        if context > artifact.config.max_positions:
            raise UsageError(
                f"--kv-trace has a sequence of {context} tokens, but the model takes {artifact.config.max_positions}"
            )
        slots = 1 + max((len(held) for held in trace.most(window)), default=0)
        options = {"batch": slots, "context": context, "kv_dtype": kv_dtype, "policy": policy, "bits": bits,
                   "chunks": (CHUNK,)}  # fmt: skip
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        _check_room(outlook(artifact, memory_budget_bytes=budget, report=report, **options), trace, window, slots)
        engine = load(
            artifact.path, budget, **options, prefix_cache=False, shadow=0.0, report=report, progress=progress,
            injected=Injected(transfer=SyncTransfer, clock=lambda: 0.0),
        )  # fmt: skip
        return cls(engine, trace, window)

    def score(
        self, windows: Sequence[np.ndarray], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Scored]:
        """Every window, in order: token ids int[len], ``2 <= len <= window``."""
        for done, window in enumerate(windows):
            yield self._window(window)
            if progress:
                progress(done + 1, len(windows))

    def _window(self, window: np.ndarray) -> Scored:
        tokens = tuple(int(t) for t in window)
        if not self.trace.arrivals:
            self._begin(self.trace.of_window(len(tokens)))
        text = self._sequence(Request("text", None, tokens[:1], score=True), len(tokens))
        logprobs, hidden = [], []
        while text.kv_tokens < len(tokens) - 1:
            end = min(text.kv_tokens + CHUNK, len(tokens))
            # Known so far, one token ahead of what is computed: a sequence that is decoded grows so.
            while len(text.prompt) < end:
                grown = min(len(text.prompt) + DECODE_TOKENS, end)
                self._advance(text, grown)
                text.prompt = tokens[:grown]
            text.prompt = tokens[: end + 1]
            given, stats = self._dispatcher.score(text)
            self.engine.boundaries.routing.add(stats, text)
            logprobs.append(given.logprob)
            hidden.append(given.hidden)
            self._watch(len(given.logprob))
        self.engine.scheduler.release(text)
        count = len(tokens) - 1
        return Scored(-np.concatenate(logprobs)[:count], np.concatenate(hidden)[:count])

    def _advance(self, text: Running, tokens: int) -> None:
        """One dispatch of the trace: a boundary, then pages for the text's ``tokens`` and for every ghost's."""
        self._come_and_go()
        idle, boundaries, pager = 0, self.engine.boundaries, self.engine.parts.pager
        while True:
            boundaries.run()
            self.course.boundaries += 1
            if self._reserve(text, tokens):
                break
            # As where an engine can run nothing: promotions first, then moves under way, then the newest sequence.
            self.course.stalled += 1
            if pager.cancel_promotions():
                continue
            idle = idle + 1 if pager.idle or boundaries.starved else 0
            if idle > PATIENCE:
                self._drop()
                idle = 0
        for arrival, ghost in self._ghosts:
            ghost.kv_tokens = _tokens(arrival, self._boundary)
        self._boundary += 1

    def _come_and_go(self) -> None:
        """Let ghosts begin and end that do so at this boundary; after the last of a file, the first comes again."""
        if self.trace.arrivals and self._boundary >= self.trace.boundaries:
            self._boundary = 0
        if self.trace.arrivals and self._boundary == 0:
            self._begin(self.trace.arrivals)
        for entry in [e for e in self._ghosts if self._boundary >= _end(e[0])]:
            self._ghosts.remove(entry)
            self.engine.scheduler.release(entry[1])
        for arrival in [a for a in self._waiting if a.at_step <= self._boundary]:
            self._waiting.remove(arrival)
            sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
            request = Request("ghost", None, (0,) * max(1, arrival.prompt_tokens), sampling)
            self._ghosts.append((arrival, self._sequence(request, arrival.prompt_tokens + arrival.max_tokens)))

    def _begin(self, arrivals: Sequence[Arrival]) -> None:
        """Play ``arrivals`` from their beginning."""
        for _, ghost in self._ghosts:
            self.engine.scheduler.release(ghost)
        self._ghosts, self._waiting, self._boundary = [], list(arrivals), 0

    def _reserve(self, text: Running, tokens: int) -> bool:
        """Whether all have their pages for this dispatch; the text comes first, then the oldest ghost."""
        wanted = [(text, tokens), *((ghost, _tokens(arrival, self._boundary)) for arrival, ghost in self._ghosts)]
        return all([self.engine.parts.kv.reserve(sequence.slot, count) for sequence, count in wanted])

    def _drop(self) -> None:
        """As an engine preempts its newest sequence, the newest ghost leaves: no precision is left to give up."""
        if not self._ghosts:
            raise PWJaxError("the KV cache of one window does not fit beside the weights at the bits of this policy")
        self.engine.scheduler.release(self._ghosts.pop()[1])
        self.course.dropped += 1

    def _sequence(self, request: Request, total: int) -> Running:
        """A sequence of ``total`` tokens in the end, in a free slot, with no pages yet."""
        self._order += 1
        sequence = Running.start(request, self._order, total, None, 0)
        sequence.max_total, sequence.slot = total, self.engine.scheduler.slots.index(None)
        self.engine.scheduler.slots[sequence.slot] = sequence
        return sequence

    def _watch(self, tokens: int) -> None:
        parts, timeline = self.engine.parts, self.course.timeline
        bits = parts.table.mean_bits(parts.pager.committed)
        before = timeline[-1][0] if timeline else 0
        timeline.append((before + tokens, bits, parts.kv.used_pages, parts.allocator.free_pages))

    @property
    def mean_bits(self) -> float:
        """Mean bits a weight over the scored tokens."""
        rows = np.array(self.course.timeline)
        return float(np.average(rows[:, 1], weights=np.diff(rows[:, 0], prepend=0)))

    def settings(self) -> dict:
        """What a report states of memory, precision and the trace, JSON-ready."""
        parts, course = self.engine.parts, self.course
        stats = self.engine.stats()
        precision = stats["precision"]
        fixed = not parts.moves and np.all(parts.start_bits == parts.start_bits[0])
        return {
            "bits": int(parts.start_bits[0]) if fixed else None,
            "mean_bits": self.mean_bits,
            "histogram": precision["histogram"],
            "memory": {**stats["memory"], **parts.memory.rows},
            "window": self.window,
            "batch": 1,
            "kv_dtype": parts.shapes.kv_dtype,
            "kv_trace": {
                "sequences": parts.shapes.slots,
                "boundaries": course.boundaries,
                "stalled": course.stalled,
                "dropped": course.dropped,
                **{name: value for name, value in precision.items() if name != "histogram"},
                "timeline": course.timeline,
            },
        }

    def close(self) -> None:
        """Free the device memory; harmless when done twice."""
        self.engine.close()

    def __enter__(self) -> "PressureScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_room(view: Outlook, trace: KVTrace, window: int, slots: int) -> None:
    """BudgetError, with a budget that works, where the trace does not fit beside the fewest pages of weights."""
    memory, shapes = view.memory, view.shapes
    if shapes.slots < slots:
        raise BudgetError(
            f"the memory budget of {memory.budget_bytes} bytes is too small for the programs of {slots} sequences; "
            "raise --memory-budget, or lower --kv-trace"
        )
    most = max((sum(map(shapes.kv_pages, held)) for held in trace.most(window)), default=0)
    need = most + shapes.kv_pages(window)
    lowest = memory.weights_min_pages if view.moves else view.plan.table.total_pages(view.plan.bits)
    lacking = need - (memory.capacity_pages - lowest)
    if lacking > 0:
        works = memory.total_bytes + lacking * memory.page_bytes
        raise BudgetError(
            f"the memory budget of {memory.budget_bytes} bytes is too small: at its peak, --kv-trace takes {need} KV "
            f"pages beside weights of {lowest}, which needs {works} bytes ({format_bytes(works)}); raise "
            "--memory-budget, or lower --kv-trace or --window",
            works,
        )

"""The engine: continuous batching over one arena, precision moving with the KV cache.

One turn of the loop, all on one thread::

    boundary   statistics -> pressure -> plan -> stage -> commit -> retire    (policy and pager)
    admit      waiting requests into free slots, KV pages reserved first
    prefill    one chunk of the oldest sequence that has prompt left
    decode     up to n tokens of every other slot, KV pages reserved first

The only device state is the dense parameters, the arena and the tables; everything else lives on the host.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager

import jax
import numpy as np

from planner import Plan
from pwjax.engine.boundary import Boundaries, Callback
from pwjax.engine.dispatch import Dispatcher
from pwjax.engine.parts import Model, Parts, Snapshot
from pwjax.engine.relief import Relief
from pwjax.engine.requests import Request, as_requests, as_scored, request_seed
from pwjax.engine.sampling import MAX_LOGPROBS, SamplingParams
from pwjax.engine.scheduler import Scheduler
from pwjax.engine.sequence import Completion, Piece, Sequence, refused
from pwjax.engine.shadow import share_of
from pwjax.engine.statistics import run_statistics
from pwjax.engine.steps import Sampled
from pwjax.engine.submission import checked
from pwjax.engine.unbroken import unbroken
from pwjax.errors import PromptError, PWJaxError, UsageError
from pwjax.memory import PageTable
from pwjax.memory.arena import free


class Engine:
    """Generates under a memory budget; make one with :func:`pwjax.load`. Not for several threads.

    A context manager: leaving it frees the device memory.
    """

    def __init__(self, parts: Parts):
        self.parts = parts
        self.model = Model(parts.shapes)
        self.config, self.tokenizer = parts.shapes.config, parts.tokenizer
        self.scheduler = Scheduler(parts.kv, parts.shapes.decode_tokens, not parts.moves, parts.prefixes)
        self.boundaries = Boundaries(parts, self.scheduler)
        self._order = 0
        self._dispatcher = Dispatcher(parts)
        self._relief = Relief(parts, self.boundaries, self.scheduler)
        self._refused: list[Completion] = []
        self._kept: list[Piece | Completion] = []  # events that nobody has taken yet
        self._ids: set[str] = set()  # of requests whose completion nobody has taken yet
        self._locked = self._stepping = False

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request; what can never run is refused with a completion, not an exception.

        PromptError where a request with the same id has not ended, or its completion was not taken yet.
        """
        self._open()
        self._take_ids([request])
        self._submit(request)

    def _submit(self, request: Request) -> None:
        try:
            request = checked(self.parts, request, self.boundaries.frozen)
        except PWJaxError as error:
            self._refused.append(refused(request, str(error)))
            self.boundaries.log("refuse", id=request.id, error=str(error))
            return
        sequence = self._sequence(request)
        self.scheduler.waiting.append(sequence)
        self.boundaries.log("submit", **sequence.submitted())

    def generate(
        self,
        prompts: str | Request | Iterable[str | Request],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions of ``prompts`` (strings or requests), in their order.

        ``sampling`` is one for all prompts or one a prompt; requests carry their own. PromptError for a prompt that
        can never run. Other requests go on meanwhile; what becomes final of them, their own :meth:`stream` or the next
        :meth:`step` returns.
        """
        frozen = self.boundaries.frozen
        return self._run([checked(self.parts, r, frozen) for r in as_requests(prompts, sampling)])

    def score(self, texts: str | Seq[int] | Request | Iterable[str | Seq[int] | Request]) -> list[np.ndarray]:
        """Log-probabilities float32[n - 1] of each text's tokens after its first, at the bits in force.

        A text is a string, token ids, or a request (for its demands); it goes through the engine's own KV pages, in
        chunks, along with whatever else runs. PromptError where a text can never run, BudgetError where the program
        does not fit the budget.
        """
        done = self._run([checked(self.parts, r, self.boundaries.frozen) for r in as_scored(texts)])
        for index, completion in enumerate(done):
            if completion.scores is None:
                raise PWJaxError(f"text {index} could not be scored: {completion.error}")
        return [np.array(completion.scores, np.float32) for completion in done]

    def stream(
        self,
        prompts: str | Request | Iterable[str | Request],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[Piece | Completion]:
        """Submit what :meth:`generate` takes; yield text as it becomes final, and each completion when it ends.

        A prompt that can never run gives a completion that says so. Leaving the iterator early cancels those of its
        requests that still run. Other requests go on meanwhile, and streams may be read in turns.
        """
        self._unlocked()
        requests = as_requests(prompts, sampling)
        self._take_ids(requests)
        left = {request.key for request in requests}
        try:
            for request in requests:
                self._submit(request)
            # Where all has ended and some are left, others have cancelled these.
            while left and not self.idle:
                if not any(str(event.id) in left for event in self._kept):
                    self._kept = self._advance()
                mine = [event for event in self._kept if str(event.id) in left]
                self._kept = [event for event in self._kept if str(event.id) not in left]
                for event in mine:
                    if isinstance(event, Completion):
                        left.discard(str(event.id))
                        self._ids.discard(str(event.id))
                    yield event
                    self._open()
        finally:
            self.cancel(left)

    def cancel(self, ids: str | int | Iterable[str | int] | None = None) -> list[Completion]:
        """Stop the requests of ``ids`` (None: all); returns what those that had begun had, with reason ``length``."""
        ids = [ids] if isinstance(ids, str | int) else ids
        wanted = None if ids is None else {str(name) for name in ids}
        self._kept = [event for event in self._kept if wanted is not None and str(event.id) not in wanted]
        self._ids = set() if wanted is None else self._ids - wanted
        scheduler = self.scheduler
        stopped = [s for s in (*scheduler.running, *scheduler.waiting) if wanted is None or s.request.key in wanted]
        if stopped:
            self.boundaries.log("cancel", ids=[s.request.id for s in stopped])
        begun = [s for s in stopped if s.slot >= 0 or s.generated]
        for sequence in stopped:
            scheduler.drop(sequence)
        self._refused = [c for c in self._refused if wanted is not None and str(c.id) not in wanted]
        for sequence in begun:
            sequence.stream.finish()
            self.boundaries.log("finish", **sequence.ended("cancelled"))
        return [sequence.completion() for sequence in begun]

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits, and nothing that became final waits to be taken."""
        return self.scheduler.idle and not self._refused and not self._kept

    # The loop

    def step(self) -> list[Piece | Completion]:
        """One turn: boundary, admission, one prefill chunk, one decode dispatch. Returns what became final.

        Ctrl-C is raised when the turn is over; the next step returns what became final in it.
        """
        events = self._advance()
        self._ids.difference_update(str(event.id) for event in events if isinstance(event, Completion))
        return events

    def _advance(self) -> list[Piece | Completion]:
        """A turn, and what nobody has taken so far."""
        self._unlocked(boundary=True)
        with unbroken() as interrupted:
            events, self._kept = self._kept + self._turn(), []
        if interrupted:
            self._kept = events
            raise KeyboardInterrupt
        return events

    def _turn(self) -> list[Piece | Completion]:
        events: list[Piece | Completion] = list(self._refused)
        self._refused.clear()
        with self._between_dispatches(), jax.profiler.TraceAnnotation("boundary"):
            self.boundaries.run()
        admitted = self.scheduler.admit()
        if admitted:
            requests = [{"id": s.request.id, "order": s.order, "slot": s.slot} for s in admitted]
            self.boundaries.log("admit", requests=requests)
        sequence, chunk = self.scheduler.next_prefill(), None
        if sequence:
            chunk = [sequence.slot, sequence.kv_tokens]
            events += self._prefill(sequence)
            chunk.append(sequence.kv_tokens - chunk[1])
        limits = self.scheduler.reserve_decode()
        if any(limits):
            events += self._decode(limits)
        elif sequence is None and not self.scheduler.idle:
            self._refused += self._relief.run()
        self.boundaries.log_turn(chunk, limits)
        return events

    def _prefill(self, sequence: Sequence) -> list[Piece | Completion]:
        if sequence.request.score:
            return self._score(sequence)
        sampled, stats = self._dispatcher.prefill(sequence)
        self.scheduler.prefilled(sequence)
        self.boundaries.routing.add(stats, sequence)
        # The token after a prompt that had to be computed again is there already.
        if sequence.kv_tokens < sequence.prefill_target or sequence.generated:
            return []
        return self._push(sequence, sampled, 0)

    def _score(self, sequence: Sequence) -> list[Piece | Completion]:
        for computed in (sequence.scores, sequence.greedy):
            del computed[sequence.kv_tokens :]  # of a sequence that was preempted: they are computed again
        given, stats = self._dispatcher.score(sequence)
        self.boundaries.routing.add(stats, sequence)
        sequence.scores += given.logprob.tolist()
        sequence.greedy += given.greedy.tolist()
        if sequence.kv_tokens < sequence.prefill_target:
            return []
        sequence.scores.pop()  # nothing follows the last token
        sequence.greedy.pop()
        sequence.finish_reason = "score"
        self.scheduler.release(sequence)
        self.boundaries.log("finish", **sequence.ended("score"))
        return [sequence.completion()]

    def _decode(self, limits: list[int]) -> list[Piece | Completion]:
        running = [s if limit else None for s, limit in zip(self.scheduler.slots, limits, strict=True)]
        sampled, stats = self._dispatcher.decode(running, limits)
        self.boundaries.routing.add(stats)
        events = []
        for slot, sequence in enumerate(running):
            if sequence:
                events += self._push(sequence, sampled, slot)
        return events

    def _push(self, sequence: Sequence, sampled: Sampled, slot: int) -> list[Piece | Completion]:
        """Hand the tokens of a dispatch to a sequence, and end it where one of them does."""
        text = ""
        for j in range(int(sampled.live[:, slot].sum())):
            if sequence.finish_reason:
                break
            token = int(sampled.token[j, slot])
            if sequence.shadowed():
                count = min(MAX_LOGPROBS, self.config.vocab_size)
                ids, scores = sampled.top_ids[j, slot, :count], sampled.top_logprobs[j, slot, :count]
                damage = self.parts.table.total_damage(self.parts.pager.committed)
                used = [round(score, 6) for score in scores.tolist()]
                sequence.shadow.append([len(sequence.generated), damage, ids.tolist(), used])
            wanted = sequence.request.sampling.logprobs
            if wanted is not None:
                ids, scores = sampled.top_ids[j, slot, :wanted], sampled.top_logprobs[j, slot, :wanted]
                top = [list(pair) for pair in zip(ids.tolist(), scores.tolist(), strict=True)]
                entry = {"token_id": token, "logprob": float(sampled.logprob[j, slot]), "top": top}
                sequence.logprobs.append(entry)
            text += sequence.push(token, self.config.eos_token_ids)
        events: list[Piece | Completion] = [Piece(sequence.request.id, text)] if text else []
        if sequence.finish_reason:
            self.scheduler.release(sequence)
            events.append(sequence.completion())
            self.boundaries.log("finish", **sequence.ended(sequence.finish_reason))
        return events

    # Precision

    def observe(self) -> Snapshot:
        """The state that plans are made from; pages count weights and KV alike."""
        return self.boundaries.observe()

    def apply(self, plan: Plan) -> None:
        """Ask for a plan's changes; they come into force at the next boundaries, as copies land.

        Also where no policy moves them (fixed bits, or after :meth:`freeze`). A plan that moves nothing by itself
        (``planner.uniform``, ``planner.fit``) asks for all of its bits. Blocks that are moving, or that have other
        bits by now than those the plan was made from, are left alone; the log counts them as ``stale``. UsageError for
        what is no plan, or one of another model.
        """
        self._unlocked()
        if not isinstance(plan, Plan):
            raise UsageError(f"apply takes a plan, as pwjax.plan(engine.observe(), target_bytes=…) gives; got {plan!r}")
        if plan.table.blocks != (blocks := self.parts.table.blocks):
            raise UsageError(f"the plan is of a model with {plan.table.blocks} blocks; this one has {blocks}")
        self.boundaries.request(plan, "plan" if self._stepping else "apply")

    def on_boundary(self, callback: Callback) -> Callable[[], None]:
        """Call ``callback(boundary)`` in every phase of every boundary from now on; returns what ends that.

        Phases come in a fixed order: stats, pressure, plan, stage, commit, retire (see :mod:`pwjax.engine.boundary`).
        A callback may apply plans and must not step the engine; what it raises reaches whoever did. UsageError for
        what cannot be called.
        """
        if not callable(callback):
            raise UsageError(f"on_boundary takes a function of a boundary, got {callback!r}")
        self.boundaries.callbacks.append(callback)
        return lambda: self.boundaries.callbacks.remove(callback)

    def settle(self, timeout_s: float = 60.0) -> None:
        """Run boundaries without the policy until no move is left; PWJaxError after ``timeout_s`` seconds."""
        self._unlocked(boundary=True)
        self.boundaries.log("settle")
        with unbroken() as interrupted, self._between_dispatches():
            self.boundaries.settle(timeout_s)
        if interrupted:
            raise KeyboardInterrupt

    def freeze(self) -> np.ndarray:
        """Keep the committed bits from now on, queued moves dropped; returns them, int32[n]."""
        self.boundaries.log("freeze")
        self.parts.pager.close()
        self.boundaries.frozen = True
        self.scheduler.reserve_all = True
        return self.parts.pager.committed

    @contextmanager
    def frozen(self) -> Iterator[tuple[dict, PageTable, jax.Array]]:
        """``(params, table, arena)`` for :func:`pwjax.forward`; the engine refuses to step inside.

        A commit would delete the donated arena under the user.
        """
        self._unlocked()
        self._locked = True
        try:
            yield self.parts.params, self.parts.page_table.table, self.parts.arena.array
        finally:
            self._locked = False

    # Reports and end

    def stats(self) -> dict:
        """The object that ``--stats`` writes: memory, precision, compile, throughput, transfers, versions."""
        return run_statistics(
            self.parts, self.scheduler.preemptions, self.boundaries.lowest_bits, self.boundaries.last_failure
        )

    def close(self) -> None:
        """Stop the transfers and free the device memory; harmless when done twice."""
        parts = self.parts
        with ExitStack() as last:  # each is done whatever the others raise, the last first
            last.callback(free, (parts.params, parts.arena.array, parts.page_table.table, parts.kv.table))
            for part in (parts.log, parts.store, parts.transfer, parts.pager):
                last.callback(part.close)
            self.cancel()
            self.boundaries.log("end")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Small helpers

    def _run(self, requests: list[Request]) -> list[Completion]:
        """Completions of checked requests, in their order; PWJaxError where one was cancelled."""
        done = {c.id: c for c in self.stream(requests) if isinstance(c, Completion)}
        if lost := [r.id for r in requests if r.id not in done]:
            raise PWJaxError(f"the request with the id {lost[0]!r} was cancelled before it had ended")
        return [done[r.id] for r in requests]

    def _take_ids(self, requests: list[Request]) -> None:
        """Ids are taken until their completion is; PromptError where one is already."""
        for request in requests:
            if request.key in self._ids:
                raise PromptError(
                    f"there is a request with the id {request.id!r} already; let it end, cancel it, or give another id"
                )
        self._ids |= {request.key for request in requests}

    def _sequence(self, request: Request) -> Sequence:
        seed = request.sampling.seed
        if seed is None:
            seed = request_seed(self.parts.seed, request.id)
        self._order += 1
        sequence = Sequence.start(request, self._order, self.parts.shapes.context, self.tokenizer, seed)
        sequence.shadow_share = share_of(request, self.parts.shadow)
        return sequence

    @contextmanager
    def _between_dispatches(self) -> Iterator[None]:
        """Callbacks of a boundary run inside: they must not start another one."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _open(self) -> None:
        if self.parts.arena.array.is_deleted():
            raise PWJaxError("the engine is closed; make another one with pwjax.load")

    def _unlocked(self, boundary: bool = False) -> None:
        self._open()
        if self._locked:
            raise PWJaxError("the engine is frozen: leave the engine.frozen() block before it can step or apply a plan")
        if boundary and self._stepping:
            raise PWJaxError(
                "a boundary callback cannot step or settle the engine; apply a plan, and let the loop go on"
            )

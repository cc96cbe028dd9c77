"""The engine: continuous batching over one arena, precision moving with the KV cache.

One turn of the loop, all on one thread::

    boundary   statistics -> pressure -> plan -> stage -> commit -> retire    (policy and pager)
    admit      waiting requests into free slots, KV pages reserved first
    prefill    one chunk of the oldest sequence that has prompt left
    decode     up to n tokens of every other slot, KV pages reserved first

The only device state is the dense parameters, the arena and the tables; everything else lives on the host.
"""

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from planner import Observation, Plan
from pwjax.engine.dispatch import Dispatcher
from pwjax.engine.parts import Model, Parts, Snapshot
from pwjax.engine.requests import Request, as_requests, request_seed
from pwjax.engine.sampling import SamplingParams
from pwjax.engine.scheduler import Scheduler
from pwjax.engine.sequence import Completion, Piece, Sequence, refused
from pwjax.engine.statistics import run_statistics
from pwjax.engine.steps import Sampled
from pwjax.errors import PromptError, PWJaxError
from pwjax.memory import PageTable
from pwjax.models import RoutingStats

# Boundaries over which the growth of running sequences counts as pressure: demotions must land before KV runs out.
LOOKAHEAD_BOUNDARIES = 8
# Weight of the newest dispatch in the running routing mass.
MASS_DECAY = 0.05


class Engine:
    """Generates under a memory budget; make one with :func:`pwjax.load`. Not for several threads.

    A context manager: leaving it frees the device memory.
    """

    def __init__(self, parts: Parts):
        self.parts = parts
        self.model = Model(parts.shapes)
        self.config, self.tokenizer = parts.shapes.config, parts.tokenizer
        self.scheduler = Scheduler(parts.kv, parts.shapes.decode_tokens, reserve_all=not parts.moves)
        self.frozen_plan = not parts.moves
        self._boundary_index = 0
        self._order = 0
        self._dispatcher = Dispatcher(parts)
        self._mass = np.array(parts.table.routing_mass, np.float64)
        self._lowest_bits = parts.table.mean_bits(parts.start_bits)
        self._refused: list[Completion] = []
        self._last_failure: str | None = None
        self._locked = False
        # The boundary of the last turn in which nothing could run although no move was on its way.
        self._stalled_at = -1
        # Whether all that the pager has left are moves that wait for free pages.
        self._starved = False

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request; what can never run is refused with a completion, not an exception."""
        try:
            request = self._checked(request)
        except PWJaxError as error:
            self._refused.append(refused(request, str(error)))
            return
        self.scheduler.waiting.append(self._sequence(request))

    def generate(
        self,
        prompts: str | Request | Iterable[str | Request],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions of ``prompts`` (strings or requests), in their order.

        ``sampling`` is one for all prompts or one a prompt; requests carry their own. PromptError for a prompt that
        can never run.
        """
        requests = [self._checked(r) for r in as_requests(prompts, sampling)]
        done = {c.id: c for c in self.stream(requests) if isinstance(c, Completion)}
        return [done[r.id] for r in requests]

    def stream(
        self,
        prompts: str | Request | Iterable[str | Request],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[Piece | Completion]:
        """Submit what :meth:`generate` takes; yield text as it becomes final, and each completion when it ends.

        A prompt that can never run gives a completion that says so. Leaving the iterator early cancels what still
        runs.
        """
        self._unlocked()
        for request in as_requests(prompts, sampling):
            self.submit(request)
        try:
            while not self.idle:
                yield from self.step()
        finally:
            self.cancel()

    def cancel(self) -> list[Completion]:
        """Stop everything that runs or waits; returns what the running ones had, with reason ``length``."""
        running = self.scheduler.running
        for sequence in running:
            self.scheduler.release(sequence)
        self.scheduler.waiting.clear()
        self.scheduler.blocked_pages = 0
        self._refused.clear()
        for sequence in running:
            sequence.stream.finish()
        return [sequence.completion() for sequence in running]

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.scheduler.idle and not self._refused

    # The loop

    def step(self) -> list[Piece | Completion]:
        """One turn: boundary, admission, one prefill chunk, one decode dispatch. Returns what became final."""
        self._unlocked()
        events: list[Piece | Completion] = list(self._refused)
        self._refused.clear()
        self._boundary()
        admitted = self.scheduler.admit()
        if admitted:
            self._log("admit", requests=[self._described(s) for s in admitted])
        sequence = self.scheduler.next_prefill()
        if sequence:
            events += self._prefill(sequence)
        limits = self.scheduler.reserve_decode()
        if any(limits):
            events += self._decode(limits)
        elif sequence is None and not self.scheduler.idle:
            self._relieve()
        return events

    def _boundary(self) -> None:
        """Let the policy plan and the pager commit; the only place where precision changes."""
        pager = self.parts.pager
        self._boundary_index += 1
        if not self.frozen_plan:
            if self.scheduler.blocked_pages:
                pager.cancel_promotions()
            plan = self.parts.policy.step(self.observe().observation)
            if plan is not None and plan.moves:
                self._request(plan)
        if not pager.idle or not self.frozen_plan:
            self._commit()

    def _commit(self) -> None:
        """Let the pager collect, commit and start copies; keep count and log."""
        report = self.parts.pager.boundary(self._boundary_index)
        self._starved = bool(report.blocked_pages) and not self.parts.pager.moving.any()
        self.parts.meter.observe()
        bits = self.parts.table.mean_bits(self.parts.pager.committed)
        self._lowest_bits = min(self._lowest_bits, bits)
        if report.failed:
            self._last_failure = report.failed[-1][1]
        if report.committed or report.failed:
            changes = [[c.block, c.from_bits, c.to_bits, c.written_pages, c.freed_pages] for c in report.committed]
            self._log(
                "commit", epoch=report.epoch, changes=changes, failed=report.failed, given_up=report.given_up,
                mean_bits=round(bits, 4),
            )  # fmt: skip

    def _request(self, plan: Plan) -> None:
        pager = self.parts.pager
        pending = self._pending()
        changes = plan.changes()
        pager.request(np.where(pending, pager.desired, plan.bits), [c.block for c in changes])
        self._log(
            "plan", cause=plan.cause, status=plan.status.name, stage=plan.stage, released_pages=plan.released_pages,
            blocks=len(changes), damage=plan.damage, mean_bits=round(self.parts.table.mean_bits(plan.bits), 4),
        )  # fmt: skip

    def _pending(self) -> np.ndarray:
        """Blocks with a move queued or in flight, and those given up: a plan leaves them alone."""
        pager = self.parts.pager
        return pager.moving | pager.given_up | (pager.desired != pager.committed)

    def _relieve(self) -> None:
        """Nothing could run: let precision give way first, else preempt the newest sequence, else refuse the last."""
        scheduler, pager = self.scheduler, self.parts.pager
        if pager.cancel_promotions():
            return
        if not pager.idle and not self._starved:
            time.sleep(0.0005)
            return
        # The policy learns at the next boundary what could not be reserved in this turn.
        first, self._stalled_at = self._stalled_at != self._boundary_index - 1, self._boundary_index
        if first and not self.frozen_plan:
            return
        sequence = scheduler.preempt_newest()
        if sequence is not None:
            self._log("preempt", id=sequence.request.id, generated=len(sequence.generated))
            return
        alone = next(iter(scheduler.running), None) or scheduler.waiting[0]
        if alone.slot < 0:
            scheduler.waiting.popleft()
            scheduler.blocked_pages = 0
        else:
            scheduler.release(alone)
        reason = "its KV cache does not fit beside the weights, and no precision is left to give up"
        # What was streamed of it stays: its pieces are out already.
        self._refused.append(replace(alone.completion(), finish_reason="refused", error=reason))

    def _prefill(self, sequence: Sequence) -> list[Piece | Completion]:
        sampled, stats = self._dispatcher.prefill(sequence)
        self._observe_routing(stats)
        # The token after a prompt that had to be computed again is there already.
        if sequence.kv_tokens < sequence.prefill_target or sequence.generated:
            return []
        return self._push(sequence, sampled, 0)

    def _decode(self, limits: list[int]) -> list[Piece | Completion]:
        running = [s if limit else None for s, limit in zip(self.scheduler.slots, limits, strict=True)]
        sampled, stats = self._dispatcher.decode(running, limits)
        self._observe_routing(stats)
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
            completion = sequence.completion()
            events.append(completion)
            self._log("finish", id=completion.id, reason=completion.finish_reason, tokens=completion.generated_tokens)
        return events

    def _observe_routing(self, stats: RoutingStats) -> None:
        mass = np.asarray(stats.mass, np.float64)
        total = mass.sum(-1, keepdims=True)
        if np.all(total > 0):
            self._mass += MASS_DECAY * (mass / total - self._mass)

    # Precision

    def observe(self) -> Snapshot:
        """The state that plans are made from; pages count weights and KV alike."""
        parts = self.parts
        growth = self.scheduler.growth_pages(LOOKAHEAD_BOUNDARIES * parts.shapes.decode_tokens)
        observation = Observation(
            bits=parts.pager.committed,
            moving=self._pending(),
            free_pages=parts.allocator.free_pages,
            growth_pages=growth,
            boundary=self._boundary_index,
            routing_mass=self._mass.copy(),
            blocked_pages=self.scheduler.blocked_pages,
            releasing_pages=parts.pager.releasing_pages,
            reserving_pages=parts.pager.reserving_pages,
        )
        return Snapshot(parts.table, observation, parts.memory.page_bytes)

    def apply(self, plan: Plan) -> None:
        """Ask for a plan's bits; they come into force at the next boundaries, as copies land.

        Also where no policy moves them (fixed bits, or after :meth:`freeze`).
        """
        self._unlocked()
        self._request(plan)

    def settle(self, timeout_s: float = 60.0) -> None:
        """Run boundaries until no move is left; PWJaxError after ``timeout_s`` seconds."""
        self._unlocked()
        began = time.monotonic()
        while not self.parts.pager.idle:
            self._boundary_index += 1
            self._commit()
            if time.monotonic() - began > timeout_s:
                raise PWJaxError(f"precision moves did not finish within {timeout_s:g} seconds")
            time.sleep(0.0005)

    def freeze(self) -> np.ndarray:
        """Keep the committed bits from now on, queued moves dropped; returns them, int32[n]."""
        self.parts.pager.close()
        self.frozen_plan = True
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
        return run_statistics(self.parts, self.scheduler.preemptions, self._lowest_bits, self._last_failure)

    def close(self) -> None:
        """Stop the transfers and free the device memory; harmless when done twice."""
        self.cancel()
        self.parts.pager.close()
        self.parts.transfer.close()
        self.parts.store.close()
        self.parts.log.close()
        device = (self.parts.params, self.parts.arena.array, self.parts.page_table.table, self.parts.kv.table)
        for array in jax.tree.leaves(device):
            if not array.is_deleted():
                array.delete()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Small helpers

    def _checked(self, request: Request) -> Request:
        """The request with token ids; PromptError where it can never run."""
        if request.prompt_token_ids is None and self.tokenizer is None:
            raise PromptError("this model has no tokenizer.json; give prompt_token_ids instead of a prompt")
        request = request.tokenized(self.tokenizer, self.config.vocab_size)  # pyright: ignore[reportArgumentType]
        length, context = len(request.prompt_token_ids or ()), self.parts.shapes.context
        if length >= context:
            limit = "model" if context == self.config.max_positions else "--context"
            raise PromptError(
                f"the prompt has {length} tokens, but the {limit} allows {context} for prompt and new tokens together; "
                "shorten the prompt" + ("" if limit == "model" else " or raise --context")
            )
        pages = self.parts.kv.pages_for(min(context, length + request.sampling.max_tokens))
        lowest = self.parts.memory.weights_min_pages
        if self.frozen_plan:
            lowest = self.parts.table.total_pages(self.parts.pager.committed)
        room = self.parts.memory.capacity_pages - lowest
        if pages > room:
            page_bytes = self.parts.memory.page_bytes
            raise PromptError(
                f"the request needs {pages * page_bytes} bytes of KV cache for {length} prompt tokens and up to "
                f"{request.sampling.max_tokens} new ones, but at most {room * page_bytes} are left beside the weights; "
                "lower max_tokens or raise --memory-budget"
            )
        return request

    def _sequence(self, request: Request) -> Sequence:
        seed = request.sampling.seed
        if seed is None:
            seed = request_seed(self.parts.seed, request.id)
        self._order += 1
        return Sequence.start(request, self._order, self.parts.shapes.context, self.tokenizer, seed)

    def _described(self, sequence: Sequence) -> dict:
        fields = {name: getattr(sequence.request.sampling, name) for name in SamplingParams.field_names()}
        return {"id": sequence.request.id, "slot": sequence.slot, "prompt_token_ids": list(sequence.prompt), **fields}

    def _log(self, kind: str, **fields) -> None:
        state = {"boundary": self._boundary_index, "free_pages": self.parts.allocator.free_pages}
        self.parts.log.write({"kind": kind, **state, "kv_pages": self.parts.kv.used_pages, **fields})

    def _unlocked(self) -> None:
        if self.parts.arena.array.is_deleted():
            raise PWJaxError("the engine is closed; make another one with pwjax.load")
        if self._locked:
            raise PWJaxError("the engine is frozen: leave the engine.frozen() block before it can step or apply a plan")

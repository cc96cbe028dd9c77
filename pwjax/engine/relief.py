"""What gives way in a turn in which nothing could run, one thing a turn: waiting, precision, the cache, a sequence."""

import time
from dataclasses import replace

from pwjax.engine.boundary import Boundaries
from pwjax.engine.parts import Parts
from pwjax.engine.scheduler import Scheduler
from pwjax.engine.sequence import Completion


class Relief:
    """The end of the order of pressure; before it, the boundary has compared prices and demoted or evicted."""

    def __init__(self, parts: Parts, boundaries: Boundaries, scheduler: Scheduler):
        self._parts, self._boundaries, self._scheduler = parts, boundaries, scheduler
        # The boundary of the last turn in which nothing could run although no move was on its way.
        self._stalled_at = -1

    def run(self) -> list[Completion]:
        """Let one thing give way; returns the last sequence, refused, where nothing else is left."""
        scheduler, boundaries, pager = self._scheduler, self._boundaries, self._parts.pager
        # Promotions that a waiting request demands go on where nothing else runs.
        if (scheduler.running or not scheduler.held) and pager.cancel_promotions():
            return []
        if not pager.idle and not boundaries.starved:
            time.sleep(0.0005)
            return []
        # The next boundary learns what could not be reserved in this turn: the policy, and the prices.
        first, self._stalled_at = self._stalled_at != boundaries.index - 1, boundaries.index
        cached = scheduler.prefixes.evictable_pages
        if first and (cached or not boundaries.frozen):
            return []
        if cached:
            gone, pages = scheduler.prefixes.evict()
            boundaries.log("evict", prefixes=gone, pages=pages)
            return []
        sequence = scheduler.preempt_newest()
        if sequence is not None:
            boundaries.log("preempt", id=sequence.request.id, order=sequence.order, generated=len(sequence.generated))
            return []
        return [self._refuse()]

    def _refuse(self) -> Completion:
        scheduler = self._scheduler
        alone = next(iter(scheduler.running), None) or scheduler.waiting[0]
        reason = "its KV cache does not fit beside the weights, and no precision is left to give up"
        if scheduler.held:
            reason = "the precision that it demands could not be reached: pages of the model could not be copied"
        scheduler.drop(alone)
        self._boundaries.log("finish", **alone.ended("refused"))
        # What was streamed of it stays: its pieces are out already.
        return replace(alone.completion(), finish_reason="refused", error=reason)

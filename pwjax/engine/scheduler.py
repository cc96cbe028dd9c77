"""Who runs: admission, prefill order, reservation of KV pages before a dispatch, preemption. Host integers only.

A dispatch is launched only when pages are reserved for every token it can commit. Where they are not, a slot takes
fewer tokens, then sits out. The planner's signals are ``growth_pages`` of what runs and ``blocked_pages``, what the
next waiting request needs and could not get.

With a plan that cannot move there is nothing to wait for, so a request is admitted only once pages for all of its
tokens are reserved: it is never preempted, and its tokens do not depend on its neighbours.
"""

from collections import deque
from collections.abc import Callable

from pwjax.engine.sequence import Sequence
from pwjax.memory.kv import KVPages


class Scheduler:
    """Waiting and running sequences over the fixed slots of ``kv``."""

    def __init__(self, kv: KVPages, decode_tokens: int, reserve_all: bool):
        self.kv = kv
        self.decode_tokens = decode_tokens
        self.reserve_all = reserve_all
        self.waiting: deque[Sequence] = deque()
        self.slots: list[Sequence | None] = [None] * kv.slots
        self.blocked_pages = 0
        self.preemptions = 0
        # Whether a sequence may run at the bits in force, and whether the first waiting one must wait for them.
        self.ready: Callable[[Sequence], bool] = lambda sequence: True
        self.held = False

    @property
    def running(self) -> list[Sequence]:
        """Sequences in slots, oldest first."""
        return sorted((s for s in self.slots if s), key=lambda s: s.order)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.waiting and not any(self.slots)

    def admit(self) -> list[Sequence]:
        """Give free slots to waiting sequences, in order, as long as their first pages can be reserved.

        What runs comes first: pages for one more dispatch of it stay free. Otherwise a sequence that was preempted
        would come back at once for the pages that it has just given up.
        """
        admitted = []
        self.blocked_pages, self.held = 0, False
        while self.waiting and None in self.slots:
            sequence = self.waiting[0]
            self.held = not self.ready(sequence)
            if self.held:
                break
            slot = self.slots.index(None)
            tokens = self._first_tokens(sequence)
            need = self.kv.pages_needed(slot, tokens)
            if need + self.growth_pages(self.decode_tokens) > self.kv.allocator.free_pages:
                self.blocked_pages = need
                break
            reserved = self.kv.reserve(slot, tokens)
            assert reserved
            self.waiting.popleft()
            sequence.slot = slot
            self.slots[slot] = sequence
            admitted.append(sequence)
        return admitted

    def next_prefill(self) -> Sequence | None:
        """The oldest sequence that has prompt tokens to process."""
        return next((s for s in self.running if s.prefilling), None)

    def reserve_decode(self) -> list[int]:
        """Tokens each slot may take in the next decode dispatch, pages reserved for them; oldest first."""
        limits = [0] * self.kv.slots
        for sequence in self.running:
            if sequence.prefilling:
                continue
            want = min(self.decode_tokens, sequence.left)
            # What the last page still holds costs nothing; the rest needs a new turn of pages.
            room = self.kv.reserved_tokens(sequence.slot) - sequence.kv_tokens
            if want > room and not self.kv.reserve(sequence.slot, sequence.kv_tokens + want):
                want = room
            limits[sequence.slot] = want
        return limits

    def growth_pages(self, tokens: int) -> int:
        """Pages that running sequences lack for ``tokens`` more tokens each, or as many as they may take."""
        return sum(
            self.kv.pages_needed(s.slot, min(max(s.kv_tokens, s.prefill_target) + tokens, s.max_total))
            for s in self.slots
            if s
        )

    def preempt_newest(self) -> Sequence | None:
        """Take the newest sequence out of its slot, to be recomputed later; None where only one runs."""
        running = self.running
        if len(running) < 2:
            return None
        sequence = running[-1]
        self.release(sequence)
        sequence.kv_tokens = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a sequence."""
        self.kv.release(sequence.slot)
        self.slots[sequence.slot] = None
        sequence.slot = -1

    def _first_tokens(self, sequence: Sequence) -> int:
        if self.reserve_all:
            return sequence.max_total
        return min(sequence.prefill_target + self.decode_tokens, sequence.max_total)

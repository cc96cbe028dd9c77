"""Who runs: admission, prefill order, reservation of KV pages before a dispatch, preemption. Host integers only.

A dispatch is launched only when pages are reserved for every token it can commit. Where they are not, a slot takes
fewer tokens, then sits out. The planner's signals are ``growth_pages`` of what runs and ``blocked_pages``, what the
next waiting request needs and could not get.

With a plan that cannot move there is nothing to wait for, so a request is admitted only once pages for all of its
tokens are reserved: it is never preempted, and its tokens do not depend on its neighbours.

A sequence that begins as one before it did shares those pages, at admission or before any chunk of its prompt; only
pages that are new count. Where bits are fixed, or a request demands some, only what was computed at the epoch in force
is shared; else also what was computed at others, as the KV of a running sequence is.
"""

from collections import deque
from collections.abc import Callable

from pwjax.engine.sequence import Sequence
from pwjax.memory import KVPages, Prefix, Prefixes


class Scheduler:
    """Waiting and running sequences over the fixed slots of ``kv``; ``epoch`` of the page table is kept up to date."""

    def __init__(self, kv: KVPages, decode_tokens: int, reserve_all: bool, prefixes: Prefixes):
        self.kv = kv
        self.prefixes = prefixes
        self.epoch = 0
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
            shared = self._found(sequence, self.prefixes.root)
            need = self.kv.pages_needed(slot, tokens) - self.prefixes.shared_pages(shared)
            if need + self.growth_pages(self.decode_tokens) > self.kv.allocator.free_pages:
                self.blocked_pages = need
                if shared:
                    self.prefixes.touch(shared[-1])
                break
            self.waiting.popleft()
            sequence.slot = slot
            self.slots[slot] = sequence
            if self.prefixes.enabled and not sequence.request.score:
                self._follow(sequence, self.prefixes.root)
            self._share(sequence, shared, tokens)
            reserved = self.kv.reserve(slot, tokens)
            assert reserved
            admitted.append(sequence)
        return admitted

    def next_prefill(self) -> Sequence | None:
        """The oldest sequence that has prompt tokens to process, what others have computed of them by now shared."""
        sequence = next((s for s in self.running if s.prefilling), None)
        if sequence and sequence.prefix is not None:
            self._share(sequence, self._found(sequence, sequence.prefix), self.kv.reserved_tokens(sequence.slot))
        return sequence

    def prefilled(self, sequence: Sequence) -> None:
        """Let others share the chunk that a sequence has just computed."""
        parent, size = sequence.prefix, self.prefixes.chunk_tokens
        if parent is None or sequence.kv_tokens != parent.end + size:
            return  # the last chunk, which is no whole one
        node = self.prefixes.add(parent, sequence.tokens(parent.end, size), sequence.slot, self.epoch)
        if node is not None:
            self._follow(sequence, node)

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
        """Free the slot of a sequence and the pages that nobody shares; what others could share stays cached."""
        self._follow(sequence, None)
        self.kv.release(sequence.slot)
        self.slots[sequence.slot] = None
        sequence.slot = -1

    def drop(self, sequence: Sequence) -> None:
        """End a sequence, running or waiting; what waiting ones lacked is found out anew."""
        if sequence.slot >= 0:
            self.release(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocked_pages, self.held = 0, False

    def _first_tokens(self, sequence: Sequence) -> int:
        if self.reserve_all:
            return sequence.max_total
        return min(sequence.prefill_target + self.decode_tokens, sequence.max_total)

    def _found(self, sequence: Sequence, start: Prefix) -> list[Prefix]:
        """Prefixes behind ``start`` that a sequence can share; none where its own scores are asked for."""
        request = sequence.request
        if not self.prefixes.enabled or request.score:
            return []
        fixed = self.reserve_all or request.min_bits or request.max_damage is not None
        return self.prefixes.match(start, sequence.tokens(0, sequence.prefill_target), self.epoch if fixed else None)

    def _share(self, sequence: Sequence, path: list[Prefix], tokens: int) -> None:
        if not path:
            return
        self.prefixes.attach(sequence.slot, path, tokens)
        self._follow(sequence, path[-1])
        sequence.kv_tokens = path[-1].end

    def _follow(self, sequence: Sequence, node: Prefix | None) -> None:
        self.prefixes.move(sequence.prefix, node)
        sequence.prefix = node

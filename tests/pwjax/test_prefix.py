"""Shared prefixes under any order of requests, chunks, evictions and finishes: every slot reads what it computed.

A KV row is the tokens up to its own, so a row that is missing, stale or somebody else's shows at once.
"""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pwjax.memory.allocator import PageAllocator
from pwjax.memory.kv import KVKind, KVPages
from pwjax.memory.prefix import Prefixes

# Chunks of 6 tokens; 4 tokens a page in one kind, 5 in the other, so chunks end inside of pages.
CHUNK, SLOTS, CONTEXT = 6, 3, 40
KINDS = [KVKind(1, 16, 64, CONTEXT), KVKind(2, 12, 64, CONTEXT)]
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=CONTEXT)


class Sharing(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(1 + 110)
        self.kv = KVPages(self.allocator, KINDS, SLOTS)
        self.prefixes = Prefixes(self.kv, CHUNK)
        self.rows = np.zeros((self.allocator.num_pages, 5), np.int64)
        self.tokens, self.done, self.nodes = [None] * SLOTS, [0] * SLOTS, [None] * SLOTS
        self.epoch = 1

    def share(self, slot, start, size, copy=True):
        path = self.prefixes.match(start, self.tokens[slot], None)
        if path:
            self.prefixes.attach(slot, path, size)
            self.prefixes.move(self.nodes[slot], path[-1])
            self.nodes[slot], self.done[slot] = path[-1], path[-1].end
        if copy:
            for source, target in self.kv.copies:
                self.rows[target] = self.rows[source]
            self.kv.copies.clear()

    def write(self, slot, count):
        start, self.done[slot] = self.done[slot], self.done[slot] + count
        for kind, (page, word) in zip(KINDS, self.kv.places(slot, start, count, count), strict=True):
            for i in range(count):
                self.rows[page[..., i], word[..., i] // kind.row_words] = self.row(slot, start + i)

    def row(self, slot, token):
        return int("1" + "".join(map(str, self.tokens[slot][: token + 1])), 2)

    @rule(slot=st.integers(0, SLOTS - 1), tokens=TOKENS, runs=st.sampled_from([True, True, True, False]))
    def start(self, slot, tokens, runs):
        """``runs`` False: the request ends before a page that it shares in part was copied."""
        if self.tokens[slot] is not None:
            return
        root, free = self.prefixes.root, self.allocator.free_pages
        need = self.kv.pages_for(len(tokens)) - self.prefixes.shared_pages(self.prefixes.match(root, tokens, None))
        if need > free:
            return
        self.tokens[slot] = tokens
        self.prefixes.move(None, root)
        self.nodes[slot] = root
        self.share(slot, root, len(tokens), copy=runs)
        assert self.kv.reserve(slot, len(tokens)) and self.allocator.free_pages == free - need
        if not runs:
            self.stop(slot)
            assert not self.kv.copies

    @rule(slot=st.integers(0, SLOTS - 1))
    def chunk(self, slot):
        tokens, node = self.tokens[slot], self.nodes[slot]
        if tokens is None or self.done[slot] == len(tokens):
            return
        self.share(slot, node, len(tokens))
        self.write(slot, min(CHUNK, len(tokens) - self.done[slot]))
        node = self.nodes[slot]
        if self.done[slot] == node.end + CHUNK:
            new = self.prefixes.add(node, tokens[node.end : node.end + CHUNK], slot, self.epoch)
            if new is not None:
                self.prefixes.move(node, new)
                self.nodes[slot] = new

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4))
    def decode(self, slot, tokens):
        if self.tokens[slot] is None or self.done[slot] < len(self.tokens[slot]):
            return
        tokens = tokens[: CONTEXT - self.done[slot]]
        if self.kv.reserve(slot, self.done[slot] + len(tokens)):
            self.tokens[slot] = self.tokens[slot] + tokens
            self.write(slot, len(tokens))

    @rule(slot=st.integers(0, SLOTS - 1))
    def stop(self, slot):
        if self.tokens[slot] is not None:
            self.prefixes.move(self.nodes[slot], None)
            self.kv.release(slot)
            self.tokens[slot], self.done[slot], self.nodes[slot] = None, 0, None

    @rule(pages=st.integers(1, 40))
    def evict(self, pages):
        free, evictable = self.allocator.free_pages, self.prefixes.evictable_pages
        _, freed = self.prefixes.evict(pages)
        assert self.allocator.free_pages == free + freed and freed >= min(pages, evictable)
        assert self.prefixes.evictable_pages == evictable - freed

    @precondition(lambda self: any(tokens is not None for tokens in self.tokens))
    @rule()
    def another_epoch(self):
        """What is computed from now on takes the place of what a strict request could not share."""
        self.epoch += 1
        slot = next(i for i, tokens in enumerate(self.tokens) if tokens is not None)
        node, tokens = self.nodes[slot], self.tokens[slot]
        if node.parent is not None and node.kept and self.done[slot] == node.end:
            self.prefixes.move(node, node.parent)
            self.nodes[slot] = self.prefixes.add(node.parent, tokens[node.parent.end : node.end], slot, self.epoch)
            assert not node.kept and self.nodes[slot].kept
            self.prefixes.move(node.parent, self.nodes[slot])

    @rule()
    def show(self):
        self.kv.apply()
        for device, host in zip(self.kv.table, self.kv.pages, strict=True):
            np.testing.assert_array_equal(np.array(device), host)

    @invariant()
    def every_slot_reads_its_own_rows(self):
        self.prefixes.check_invariants()
        self.allocator.check_invariants()
        for slot, done in enumerate(self.done):
            want = [self.row(slot, token) for token in range(done)]
            for kind, pages in zip(KINDS, self.kv.pages, strict=True):
                token = np.arange(done)
                rows = self.rows[pages[slot][..., token // kind.page_tokens], token % kind.page_tokens]
                np.testing.assert_array_equal(rows, np.broadcast_to(np.array(want, np.int64), rows.shape))

    def teardown(self):
        for slot in range(SLOTS):
            self.stop(slot)
        self.prefixes.evict()
        assert self.allocator.used_pages == 0 and self.prefixes.evictable_pages == 0


def test_any_order_of_sharing_keeps_every_row():
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options = settings(max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=health)
    run_state_machine_as_test(Sharing, settings=options)


def kept(prefixes, chunks, slot=0):
    """Compute prompts of chunks (a chunk is one repeated number) in turn; returns the nodes."""
    nodes = []
    for chunk in chunks:
        prefixes.kv.reserve(slot, CHUNK)
        nodes.append(prefixes.add(prefixes.root, [chunk] * CHUNK, slot, 1))
        prefixes.move(None, nodes[-1])
        prefixes.move(nodes[-1], None)
        prefixes.kv.release(slot)
    return nodes


def test_the_least_recently_used_goes_first():
    prefixes = Prefixes(KVPages(PageAllocator(200), KINDS, 1), CHUNK)
    a, b, c = kept(prefixes, [1, 2, 3])
    prefixes.touch(a)
    assert prefixes.evict(prefixes=1) == (1, 12) and not b.kept
    assert prefixes.evict(pages=1) == (1, 12) and not c.kept and a.kept
    assert prefixes.evictable_pages == 12 and prefixes.evicted == 2


def test_the_last_token_is_always_computed_and_epochs_can_be_asked_for():
    prefixes = Prefixes(KVPages(PageAllocator(200), KINDS, 1), CHUNK)
    (node,) = kept(prefixes, [1])
    assert prefixes.match(prefixes.root, [1] * CHUNK, None) == []
    assert prefixes.match(prefixes.root, [1] * (CHUNK + 1), None) == [node]
    assert prefixes.match(prefixes.root, [1] * (CHUNK + 1), 1) == [node]
    assert prefixes.match(prefixes.root, [1] * (CHUNK + 1), 2) == []


def test_rings_are_not_shared():
    ring = [KVKind(1, 16, 64, CONTEXT, window=8), KINDS[1]]
    assert not Prefixes(KVPages(PageAllocator(200), ring, 1), CHUNK).enabled
    covers_all = [KVKind(1, 16, 64, CONTEXT, window=CONTEXT), KINDS[1]]
    assert Prefixes(KVPages(PageAllocator(200), covers_all, 1), CHUNK).enabled

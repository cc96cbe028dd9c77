"""Shared prompts: a trie of prompt chunks whose KV is in pages, for sequences that begin alike. Host bookkeeping only.

A node is one chunk of ``chunk_tokens`` tokens after another, the largest size that prompts are cut into: every prompt
that goes on past it cuts the same chunk at the same place, so the shared rows are those that it would have computed.
A sequence shares whole pages; the page in which its last shared chunk ends is copied, for it will write behind it
(``copies``, carried out before the next dispatch reads them). Pages count references (see :class:`KVPages`), so a node
may leave the trie at any time; what no running sequence needs is :meth:`~Prefixes.evict`-able.

A ring of a sliding window writes over its first pages, so where a kind of attention has one, nothing is shared.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pwjax.memory.kv import KVPages


@dataclass(eq=False)
class Prefix:
    """A chunk of ``tokens`` behind ``parent``, in the pages ``turns`` (for each kind int32[turns, pages of a turn]).

    ``end`` tokens go up to its last; ``epoch`` of the page table at which it was computed; ``kept``: it is in the trie.
    """

    parent: "Prefix | None" = None
    tokens: tuple[int, ...] = ()
    end: int = 0
    epoch: int = 0
    turns: tuple[np.ndarray, ...] = ()
    children: dict[tuple[int, ...], "Prefix"] = field(default_factory=dict)
    used_at: int = 0
    kept: bool = True


class Prefixes:
    """The trie over the pages of ``kv``; with ``enabled`` off, or with a ring among the kinds, it stays empty.

    ``found_chunks`` and ``computed_chunks`` count what :meth:`attach` and :meth:`add` were called for, ``hits`` the
    calls of :meth:`attach`, ``evicted`` the nodes that :meth:`evict` dropped.
    """

    def __init__(self, kv: KVPages, chunk_tokens: int, enabled: bool = True):
        self.kv, self.chunk_tokens = kv, chunk_tokens
        self.enabled = enabled and not any(kind.wraps for kind in kv.kinds)
        self.root = Prefix()
        self.hits = self.found_chunks = self.computed_chunks = self.evicted = 0
        self._users: dict[Prefix, int] = {}
        self._clock = 0
        self._evictable: int | None = 0

    @property
    def reuse(self) -> float:
        """Share of the chunks so far that were found, not computed."""
        return self.found_chunks / max(1, self.found_chunks + self.computed_chunks)

    @property
    def chunk_pages(self) -> float:
        """Pages of a chunk, on the average over its places."""
        return sum(kind.turn_pages * self.chunk_tokens / kind.page_tokens for kind in self.kv.kinds)

    @property
    def evictable_pages(self) -> int:
        """Pages that evicting everything would free."""
        if self._evictable is None:
            only_kept = self.kv.only_kept()
            for node in self._users:
                while node.parent is not None and node.kept:
                    for ids in node.turns:
                        only_kept[ids] = False
                    node = node.parent
            self._evictable = int(np.count_nonzero(only_kept))
        return self._evictable

    def match(self, start: Prefix, tokens: Sequence[int], epoch: int | None) -> list[Prefix]:
        """Nodes that follow ``start`` along ``tokens`` (from the first one on), at least one token left over.

        ``epoch``: take nodes of this one only.
        """
        path, node = [], start
        while (end := node.end + self.chunk_tokens) < len(tokens):
            child = node.children.get(tuple(tokens[node.end : end]))
            if child is None or epoch not in (None, child.epoch):
                break
            path.append(child)
            node = child
        return path

    def shared_pages(self, path: Sequence[Prefix]) -> int:
        """Pages of a sequence that need not be its own when it begins with ``path`` (from the root on)."""
        end = path[-1].end if path else 0
        return sum(end // kind.page_tokens * kind.turn_pages for kind in self.kv.kinds)

    def attach(self, slot: int, path: Sequence[Prefix], tokens: int) -> None:
        """Let a slot share ``path`` (not empty, what the slot has so far is before it) and hold ``tokens`` in all.

        Pages of its own that are shared now go back. The pages that it lacks for ``tokens`` must be free.
        """
        begin, end = path[0].end - self.chunk_tokens, path[-1].end
        edges = []
        for index, kind in enumerate(self.kv.kinds):
            # A page that two chunks have in common: that of the later one holds the rows of both.
            columns: dict[int, np.ndarray] = {}
            for node in path:
                first = (node.end - self.chunk_tokens) // kind.page_tokens
                columns |= {first + i: ids for i, ids in enumerate(node.turns[index])}
            first, whole = begin // kind.page_tokens, end // kind.page_tokens
            if whole > first:
                self.kv.share(slot, index, first, np.stack([columns[t] for t in range(first, whole)]))
            if end % kind.page_tokens:
                edges.append((index, whole, columns[whole]))
        reserved = self.kv.reserve(slot, tokens)
        assert reserved
        for index, turn, ids in edges:
            self.kv.copies.append((ids, self.kv.columns(slot, index, turn, turn + 1)[0]))
        self.hits += 1
        self.found_chunks += len(path)
        self._evictable = None

    def add(self, parent: Prefix, tokens: Sequence[int], slot: int, epoch: int) -> Prefix | None:
        """The node of a chunk that ``slot`` has just computed behind ``parent``; None where that has left the trie.

        What was computed for the same tokens at another epoch makes way.
        """
        self.computed_chunks += 1
        if not parent.kept:
            return None
        key = tuple(tokens)
        old = parent.children.get(key)
        if old is not None and old.epoch == epoch:
            return old
        if old is not None:
            self._discard(old)
        end, turns = parent.end + self.chunk_tokens, []
        for index, kind in enumerate(self.kv.kinds):
            turns.append(self.kv.columns(slot, index, parent.end // kind.page_tokens, -(-end // kind.page_tokens)))
            self.kv.keep(turns[-1])
        node = parent.children[key] = Prefix(parent, key, end, epoch, tuple(turns))
        self._evictable = None
        return node

    def move(self, old: Prefix | None, new: Prefix | None) -> None:
        """A running sequence that needed ``old`` needs ``new`` now; None: nothing."""
        if new is not None:
            self._users[new] = self._users.get(new, 0) + 1
        if old is not None:
            self._users[old] -= 1
            if not self._users[old]:
                del self._users[old]
        self.touch(new or old)
        self._evictable = None

    def touch(self, node: Prefix | None) -> None:
        """Note that ``node``, and what it continues, is wanted now: it is evicted late."""
        self._clock += 1
        while node is not None:
            node.used_at, node = self._clock, node.parent

    def evict(self, pages: int | None = None, prefixes: int | None = None) -> tuple[int, int]:
        """Drop unused nodes, ends first, the least recently used first; returns nodes dropped and pages freed.

        Until ``pages`` are freed, or ``prefixes`` nodes are dropped; None: no limit.
        """
        heap = [(node.used_at, node.end, i, node) for i, node in enumerate(self._nodes()) if self._idle(node)]
        heapq.heapify(heap)
        count, gone, freed = len(heap), 0, 0
        while heap and (pages is None or freed < pages) and (prefixes is None or gone < prefixes):
            node = heapq.heappop(heap)[-1]
            parent = node.parent
            freed, gone, count = freed + self._discard(node), gone + 1, count + 1
            if parent is not None and self._idle(parent):
                heapq.heappush(heap, (parent.used_at, parent.end, -count, parent))
        self.evicted += gone
        return gone, freed

    def check_invariants(self) -> None:
        """:class:`PageError` unless exactly the pages of the nodes are kept."""
        kept = np.zeros(self.kv.allocator.num_pages, np.int64)
        for node in self._nodes():
            for ids in node.turns:
                np.add.at(kept, ids, 1)
        self.kv.check_invariants(kept)

    def _nodes(self) -> list[Prefix]:
        found, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found

    def _idle(self, node: Prefix) -> bool:
        return node.parent is not None and not node.children and node not in self._users

    def _discard(self, node: Prefix) -> int:
        """Take a node and all behind it out of the trie; sequences that use them keep their pages."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        freed, stack = 0, [node]
        while stack:
            node = stack.pop()
            freed += sum(self.kv.drop(ids) for ids in node.turns)
            node.kept = False
            stack += node.children.values()
            node.children = {}
        self._evictable = None
        return freed

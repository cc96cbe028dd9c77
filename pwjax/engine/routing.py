"""What the running text routes to: a decayed mass of all tokens, and features of each running request's prompt.

Features are of the prompt alone, as in the paper: tokens that a request generates do not change them.
"""

from typing import NamedTuple

import numpy as np

from planner import BlockTable
from pwjax.engine.sequence import Sequence
from pwjax.memory import KVPages
from pwjax.models import RoutingStats

# After this many tokens of other text, what was seen counts half.
HALF_LIFE_TOKENS = 1024


class Prompt(NamedTuple):
    """Sums over the prefill of one request: ``mass`` and ``count`` float64[L, E] and ``norms`` float64[L, E, 2, 3] of
    :class:`RoutingStats`, ``moments`` float64[n, B-1] of ``planner.MomentsReference.sums``, None where not asked for.
    """

    mass: np.ndarray
    count: np.ndarray
    norms: np.ndarray
    moments: np.ndarray | None

    def plus(self, other: "Prompt") -> "Prompt":
        """Both, of other tokens."""
        norms = self.norms + other.norms
        norms[..., 2] = np.maximum(self.norms[..., 2], other.norms[..., 2])
        moments = None if self.moments is None or other.moments is None else self.moments + other.moments
        return Prompt(self.mass + other.mass, self.count + other.count, norms, moments)


class RoutingRecord:
    """Keeps ``mass`` and ``choices`` float64[L, E], decayed sums of router weight and of how often each expert was
    chosen, and the ``tokens`` they stand for, all 0 at first.

    Prompts are kept apart, for as long as their request runs: what a dispatch of several requests routed to cannot be
    told apart, but a prefill is one request's alone.
    """

    def __init__(self, table: BlockTable):
        self._table = table
        self.mass = np.zeros(table.routing_mass.shape)
        self.choices = np.zeros(table.routing_mass.shape)
        self.tokens = 0.0
        self._reference = None if table.heads is None else table.heads.reference
        self._prompts: dict[int, Prompt] = {}
        # Shares and features of those whose prefill has not gone on since they were last asked for.
        self._known: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        # Requests whose moments were last taken together, and the features of these; None: a prefill has gone on.
        self._together: tuple[list[int], np.ndarray | None] | None = None

    @property
    def shares(self) -> np.ndarray:
        """Recent router-weight shares float64[L, E], those of calibration before the first token."""
        return self.mass / self.mass.sum(axis=1, keepdims=True) if self.tokens else self._table.routing_mass.copy()

    def add(self, stats: RoutingStats, sequence: Sequence | None = None) -> None:
        """Take one dispatch; ``sequence``: whose prefill it was."""
        mass, count = np.asarray(stats.mass, np.float64), np.asarray(stats.count, np.float64)
        # All layers see the same tokens, and a token's choices are counted in each.
        tokens = float(count[0].sum()) / self._table.choices
        if tokens and np.all(mass.sum(axis=1) > 0):
            kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
            self.mass, self.choices = kept * self.mass + mass, kept * self.choices + count
            self.tokens = kept * self.tokens + tokens
        if sequence is not None:
            moments = None
            if self._reference is not None and stats.moments is not None:
                moments = self._reference.sums(stats.moments)
            seen = Prompt(mass, count, np.array(stats.norms, np.float64), moments)
            before = self._prompts.get(sequence.order)
            self._prompts[sequence.order] = seen if before is None else before.plus(seen)
            self._known.pop(sequence.order, None)
            self._together = None

    def prompts(self, running: list[Sequence], kv: KVPages) -> tuple[np.ndarray | None, np.ndarray | None]:
        """``(request_mass, residual)`` of the running requests, averaged by their KV pages (the paper's batch merge).

        Float64[L, E], and what ``ResidualHeads.factor`` takes or None where that was not asked for; None, None where no
        running request has routed anything. Forgets the others. Moments are not averaged: those of all prompts are
        taken together, since a prompt that does not use an expert says nothing of it.
        """
        orders = {sequence.order for sequence in running}
        self._prompts = {order: seen for order, seen in self._prompts.items() if order in orders}
        self._known = {order: seen for order, seen in self._known.items() if order in orders}
        weights = {s.order: kv.slot_pages(s.slot) for s in running if s.order in self._prompts}
        total = sum(weights.values())
        if not total:
            return None, None
        merge = lambda which: sum(w / total * self._seen(order)[which] for order, w in weights.items())  # noqa: E731
        return merge(0), merge(1) if self._reference is None else self._of_moments(list(weights))

    def _of_moments(self, orders: list[int]) -> np.ndarray | None:
        """Features of the moments of these requests' prompts together, None where one of them has none."""
        if self._together is None or self._together[0] != orders:
            seen = [self._prompts[order] for order in orders]
            moments, found = [prompt.moments for prompt in seen], None
            if all(own is not None for own in moments):
                count = np.sum([prompt.count for prompt in seen], axis=0)
                found = self._reference.features(np.sum(moments, axis=0), count)
            self._together = orders, found
        return self._together[1]

    def _seen(self, order: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Routing shares float64[L, E] of one prompt, and the features float64[n, 4] of the paper's heads if these are
        asked for."""
        if order not in self._known:
            seen = self._prompts[order]
            own = features(seen.mass, seen.norms).reshape(-1, 4) if self._reference is None else None
            self._known[order] = seen.mass / np.maximum(seen.mass.sum(axis=1, keepdims=True), 1e-30), own
        return self._known[order]


def features(mass: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Features float64[L, E, 2, 4] of ``planner.ResidualHeads``: mean, RMS and maximum norm, and 1 where used.

    ``mass`` float[L, E] and ``norms`` float[L, E, 2, 3] as in :class:`RoutingStats`.
    """
    used = np.broadcast_to(mass[..., None] > 0, norms.shape[:3])
    weight = np.where(used, mass[..., None], 1)
    mean, square = norms[..., 0] / weight, norms[..., 1] / weight
    return np.stack([mean, np.sqrt(square), norms[..., 2], np.ones_like(mean)], axis=-1) * used[..., None]

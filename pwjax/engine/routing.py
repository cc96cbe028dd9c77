"""What the running text routes to: a decayed mass of all tokens, and features of each running request's prompt."""

import numpy as np

from planner import BlockTable
from pwjax.engine.sequence import Sequence
from pwjax.memory import KVPages
from pwjax.models import RoutingStats

# After this many tokens of other text, what was seen counts half.
HALF_LIFE_TOKENS = 1024


class RoutingRecord:
    """Keeps ``mass`` float64[L, E], a decayed sum of router weight, and the ``tokens`` it stands for, both 0 at first.

    Prompts are kept apart, for as long as their request runs: what a dispatch of several requests routed to cannot be
    told apart, but a prefill is one request's alone.
    """

    def __init__(self, table: BlockTable):
        self._table = table
        self.mass = np.zeros(table.routing_mass.shape)
        self.tokens = 0.0
        self._prompts: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def shares(self) -> np.ndarray:
        """Recent router-weight shares float64[L, E], those of calibration before the first token."""
        return self.mass / self.mass.sum(axis=1, keepdims=True) if self.tokens else self._table.routing_mass.copy()

    def add(self, stats: RoutingStats, sequence: Sequence | None = None) -> None:
        """Take one dispatch; ``sequence``: whose prefill it was."""
        mass = np.asarray(stats.mass, np.float64)
        # All layers see the same tokens, and a token's choices are counted in each.
        tokens = float(np.asarray(stats.count)[0].sum()) / self._table.choices
        if tokens and np.all(mass.sum(axis=1) > 0):
            kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
            self.mass, self.tokens = kept * self.mass + mass, kept * self.tokens + tokens
        if sequence is not None:
            norms = np.asarray(stats.norms, np.float64)
            before = self._prompts.get(sequence.order)
            if before is not None:
                sums = before[1][..., :2] + norms[..., :2]
                norms = np.concatenate([sums, np.maximum(before[1][..., 2:], norms[..., 2:])], axis=-1)
                mass = mass + before[0]
            self._prompts[sequence.order] = mass, norms

    def prompts(self, running: list[Sequence], kv: KVPages) -> tuple[np.ndarray | None, np.ndarray | None]:
        """``(request_mass, residual)`` of the running requests, averaged by their KV pages (the paper's batch merge).

        Float64[L, E] and float64[n, 4]; None, None where no running request has routed anything. Forgets the others.
        """
        orders = {sequence.order for sequence in running}
        self._prompts = {order: seen for order, seen in self._prompts.items() if order in orders}
        weights = {s.order: kv.slot_pages(s.slot) for s in running if s.order in self._prompts}
        total = sum(weights.values())
        if not total:
            return None, None
        merged_mass, merged_features = np.zeros_like(self.mass), np.zeros((*self.mass.shape, 2, 4))
        for order, pages in weights.items():
            mass, norms = self._prompts[order]
            merged_mass += pages / total * mass / np.maximum(mass.sum(axis=1, keepdims=True), 1e-30)
            merged_features += pages / total * features(mass, norms)
        return merged_mass, merged_features.reshape(-1, 4)


def features(mass: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Features float64[L, E, 2, 4] of ``planner.ResidualHeads``: mean, RMS and maximum norm, and 1 where used.

    ``mass`` float[L, E] and ``norms`` float[L, E, 2, 3] as in :class:`RoutingStats`.
    """
    used = np.broadcast_to(mass[..., None] > 0, norms.shape[:3])
    weight = np.where(used, mass[..., None], 1)
    mean, square = norms[..., 0] / weight, norms[..., 1] / weight
    return np.stack([mean, np.sqrt(square), norms[..., 2], np.ones_like(mean)], axis=-1) * used[..., None]

"""Floors: how low each block may be taken, and how that is relaxed when memory runs out.

Damage is heavy-tailed: a few blocks decide the quality of a plan. The rule sorts blocks into buckets by what
they would cost at the lowest width under today's routing, and holds each bucket one width higher than the one
before. Relaxing a stage lowers every floor by one width, but not below what calibration advises; the last stage has
no floor but the lowest width.
"""

from dataclasses import dataclass

import numpy as np

from planner.tables import BlockTable


@dataclass(frozen=True)
class FloorRule:
    """Buckets by quantile: a block above ``k`` of ``quantiles`` is held ``k`` widths above the lowest."""

    quantiles: tuple[float, ...] = (0.5, 0.9)

    def __post_init__(self):
        if list(self.quantiles) != sorted(self.quantiles) or not all(0 <= q <= 1 for q in self.quantiles):
            raise ValueError(f"floor quantiles must ascend within 0..1, got {self.quantiles}")

    def stages(self, table: BlockTable, damage: np.ndarray | None = None) -> list[np.ndarray]:
        """Floor bits int64[n] a stage, strictest first. ``damage`` float64[n, B] of now, None: as calibrated."""
        score = (table.expected if damage is None else damage)[:, 0] / table.params
        advised = np.zeros(table.blocks, int) if table.floors is None else table.level(table.floors)
        return [table.bits(level) for level in staged(bucket(score, self.quantiles), highest(table), advised)]


def bucket(score: np.ndarray, quantiles: tuple[float, ...]) -> np.ndarray:
    """How many of the ``quantiles`` of ``score`` float[n] each block is above, int64[n]."""
    # Strictly above: blocks that cannot be told apart share the lower bucket.
    return np.searchsorted(np.quantile(score, quantiles), score)


def highest(table: BlockTable) -> int:
    """The highest level that a floor may ask for: 16 bits are never held."""
    return max(i for i, b in enumerate(table.widths) if b < 16 or i == 0)


def staged(level: np.ndarray, most: int, advised: np.ndarray) -> list[np.ndarray]:
    """Floors int64[n], strictest first: ``level`` lowered by one a stage down to ``advised``, at last to 0."""
    level = np.minimum(level, most)
    stages: list[np.ndarray] = []
    for stage in range(int(level.max()) + 1):
        stages.append(np.maximum(level - stage, advised))
    if stages[-1].any():
        stages.append(np.zeros_like(level))
    # Where advice lies above the buckets, several stages are the same.
    return [floor for i, floor in enumerate(stages) if i == 0 or (floor != stages[i - 1]).any()]

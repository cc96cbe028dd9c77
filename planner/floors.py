"""Floors: how low each block may be taken, and how that is relaxed when memory runs out.

Damage is heavy-tailed: a few blocks decide the quality of a plan. The rule sorts blocks into buckets by what
they would cost at the lowest width under today's routing, and holds each bucket one width higher than the one
before. Relaxing a stage lowers every floor by one width; the last stage has no floor but the lowest width.
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

    def stages(self, table: BlockTable, routing_mass: np.ndarray | None = None) -> list[np.ndarray]:
        """Floor bits int64[n] a stage, strictest first. ``routing_mass`` float[layers, experts]: routing of today."""
        score = table.expected_damage(routing_mass)[:, 0] / table.params
        # Strictly above: blocks that cannot be told apart share the lower bucket.
        bucket = (score[:, None] > np.quantile(score, self.quantiles)).sum(axis=1)
        highest = max(i for i, b in enumerate(table.widths) if b < 16 or i == 0)
        level = np.minimum(bucket, highest)
        return [table.bits(np.maximum(level - stage, 0)) for stage in range(int(level.max()) + 1)]

"""Kinds of text: what calibration found in each of its texts apart, and which of them the running text is like.

Experts serve several kinds of text, and the damage of a routed token depends on the kind. A table over mixed text has
the average; routing tells more, since kinds use experts differently: the running routing is taken for a mixture of
calibration's texts, and a block's damage is averaged over the texts that its tokens then come from.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Rounds of expectation maximization: shares of texts that use different experts settle in a few.
ROUNDS = 20
# Share of an expert's fair share that every text is given of it: nothing is impossible.
RARE = 0.05


@dataclass(frozen=True, eq=False)
class TextKinds:
    """K texts of calibration. ``damage`` float64[K, n, B] of a routed token in each of them, as in ``BlockTable``;
    ``usage`` float64[K, layers, experts]: how often each expert is chosen, any scale a layer.

    Raises ValueError for shapes that do not match, numbers that are not finite or negative, and damage that grows with
    bits.
    """

    damage: np.ndarray
    usage: np.ndarray

    def __post_init__(self):
        damage, usage = np.array(self.damage, float), np.array(self.usage, float)
        if damage.ndim != 3 or usage.ndim != 3 or len(damage) != len(usage) or not len(usage):
            raise ValueError(f"texts need damage [K, n, B] and usage [K, L, E], got {damage.shape} and {usage.shape}")
        for name, array in (("damage", damage), ("usage", usage)):
            if not (np.isfinite(array) & (array >= 0)).all():
                raise ValueError(f"{name} of kinds of text must be finite and not negative")
        if not usage.any(axis=2).all():
            raise ValueError("every kind of text must use some expert in every layer")
        if (np.diff(damage, axis=2) > 0).any():
            raise ValueError("damage of kinds of text must not grow with bits")
        for name, array in (("damage", damage), ("usage", usage)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @cached_property
    def _shares(self) -> np.ndarray:
        """Share of each expert in a layer, float64[K, layers * experts], none of them zero."""
        usage = self.usage + RARE * self.usage.mean(axis=2, keepdims=True)
        return (usage / usage.sum(axis=2, keepdims=True)).reshape(len(usage), -1)

    @cached_property
    def _by_width(self) -> np.ndarray:
        """Damage with blocks last, float64[K, B, n]: NumPy is fast along blocks."""
        return np.ascontiguousarray(self.damage.swapaxes(1, 2))

    def mixture(self, usage: np.ndarray) -> np.ndarray:
        """Shares float64[K] of the texts under which ``usage`` float[layers, experts], not all 0, is most likely."""
        seen = np.asarray(usage, float).ravel() / np.sum(usage)
        weights = np.full(len(self._shares), 1 / len(self._shares))
        for _ in range(ROUNDS):
            weights = self._given(weights) @ seen
        return weights

    def of_blocks(self, weights: np.ndarray) -> np.ndarray:
        """Chance float64[K, n] that a token of a block is of each text, under shares ``weights`` float64[K]."""
        return np.repeat(self._given(weights), 2, axis=1)

    def conditional(self, chances: np.ndarray) -> np.ndarray:
        """Damage float64[n, B] of a routed token under :meth:`of_blocks` float64[K, n]."""
        return np.einsum("kbn,kn->bn", self._by_width, chances).T

    def _given(self, weights: np.ndarray) -> np.ndarray:
        """Chance float64[K, layers * experts] that a token of an expert is of each text."""
        joint = weights[:, None] * self._shares
        return joint / joint.sum(axis=0)

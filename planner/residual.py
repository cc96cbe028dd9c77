"""Prompt residual: how much more a prompt hurts than calibration text did, from three norms (paper, eq. 5 and 6).

Features of a block are four numbers: the routing-weighted mean, the routing-weighted RMS and the maximum of its
inputs' norms, and 1. An expert that a prompt did not use has four zeros. Features of several requests are averaged,
weighted by their KV pages: the heads are linear, so that averages what they predict.
"""

from dataclasses import dataclass

import numpy as np

FEATURES = ("mean norm", "RMS norm", "maximum norm", "used")


@dataclass(frozen=True, eq=False)
class ResidualHeads:
    """One linear head a matrix and transition, shared by all blocks of the matrix.

    ``weights`` float64[2, B-1, 4]: the paper's ``w`` and ``a``, fitted to the logarithm of measured over predicted
    damage; ``confidence`` float64[2, B-1] in 0..1; ``low`` and ``high`` float64[2, B-1]: bounds of the prediction.
    Raises ValueError for shapes that do not match, numbers that are not finite, or bounds that cross.
    """

    weights: np.ndarray
    confidence: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def __post_init__(self):
        for name in ("weights", "confidence", "low", "high"):
            array = np.array(getattr(self, name), float)
            shape = (*self.shape, len(FEATURES)) if name == "weights" else self.shape
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"residual {name} must be finite and of shape {shape}, got {array.shape}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if (self.low > self.high).any() or (self.confidence < 0).any() or (self.confidence > 1).any():
            raise ValueError("residual heads need low <= high and a confidence within 0..1")

    @property
    def shape(self) -> tuple[int, ...]:
        """``(2, B-1)``."""
        return np.shape(self.confidence)

    def factor(self, features: np.ndarray, strength: float = 1.0) -> np.ndarray:
        """``eta = exp(alpha * c * clip(rho, low, high))``, float64[n, B-1]; ``features`` float[n, 4].

        ``strength`` is ``alpha``. Blocks alternate between the two matrices. ValueError for another shape.
        """
        features = np.asarray(features, float)
        if features.ndim != 2 or features.shape[1] != len(FEATURES) or not np.isfinite(features).all():
            raise ValueError(f"residual features must be finite and of shape [n, 4], got {features.shape}")
        rho = np.einsum("emf,mjf->emj", features.reshape(-1, 2, len(FEATURES)), self.weights)
        eta = np.exp(strength * self.confidence * np.clip(rho, self.low, self.high))
        return eta.reshape(-1, self.shape[1])

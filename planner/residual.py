"""Prompt residual: how much more a prompt hurts than calibration text did (paper, eq. 5 and 6).

Features come in one of two forms. ``paper`` has four numbers a block: the routing-weighted mean, the routing-weighted
RMS and the maximum of its inputs' norms, and 1. ``moments`` has one number a block and transition: the logarithm of
the damage that second moments of its inputs predict, over that of calibration text. Either has zeros for an expert
that a prompt did not use. Features of several requests are averaged, weighted by their KV pages: the paper's heads are
linear, so that averages what they predict. Moments of several requests are summed instead, and features are of the sum.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

FEATURES = ("mean norm", "RMS norm", "maximum norm", "used")


@dataclass(frozen=True, eq=False)
class MomentsReference:
    """What second moments of inputs are held against; K is the hidden size for ``gate_up``, the inner one for ``down``.

    ``energy_gate_up`` and ``energy_down`` float16[L, E, B-1, K]: the error that a transition adds to each input column
    on its way to the layer's output, each block and transition in a unit of its own. ``mean`` float64[n, B-1]: what a
    routed token of calibration text has on average, in that unit; not positive where nothing is known. ``kind_mean``
    float64[K, n, B-1]: the same of each of calibration's texts, None where there was one. Raises ValueError for shapes
    that do not match or numbers that are not finite.
    """

    energy_gate_up: np.ndarray
    energy_down: np.ndarray
    mean: np.ndarray
    kind_mean: np.ndarray | None = None

    def __post_init__(self):
        lead = np.shape(self.energy_gate_up)[:3]
        if len(lead) != 3 or np.shape(self.energy_down)[:3] != lead:
            raise ValueError(f"column energies must both be [L, E, B-1, K], got {lead} for gate_up")
        if np.shape(self.mean) != (lead[0] * lead[1] * 2, lead[2]):
            raise ValueError(f"mean moments must be [n, B-1] for energies of {lead}, got {np.shape(self.mean)}")
        if self.kind_mean is not None and np.shape(self.kind_mean)[1:] != np.shape(self.mean):
            raise ValueError(f"mean moments of texts must be [K, n, B-1], got {np.shape(self.kind_mean)}")
        for name in ("energy_gate_up", "energy_down", "mean", "kind_mean"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                raise ValueError(f"residual {name} must be finite")

    @cached_property
    def _energies(self) -> tuple[np.ndarray, np.ndarray]:
        """In float32, which products are quick in."""
        return np.asarray(self.energy_gate_up, np.float32), np.asarray(self.energy_down, np.float32)

    def sums(self, moments: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Predicted damage float64[n, B-1], a sum over tokens, of moments (float32[L, E, H], float32[L, E, I])."""
        parts = [e @ np.asarray(m, np.float32)[..., None] for e, m in zip(self._energies, moments, strict=True)]
        return np.concatenate(parts, -1).swapaxes(2, 3).reshape(self.mean.shape).astype(np.float64)

    def features(self, sums: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Features float64[n, B-1, 1] of :meth:`sums` over ``tokens`` float[L, E] routed tokens."""
        own = sums / np.maximum(np.repeat(tokens.reshape(-1), 2), 1)[:, None]
        known = (own > 0) & (self.mean > 0)
        return np.log(np.where(known, own, 1) / np.where(known, self.mean, 1))[..., None]

    def beyond(self, features: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """``features`` float64[n, B-1, 1] over the average of the texts that a block's tokens come from, in place of
        all of calibration; ``chances`` float64[K, n] as ``TextKinds.of_blocks`` has them."""
        if self.kind_mean is None:
            return features
        mean = np.einsum("kn,knb->nb", chances, self.kind_mean)
        known = (features[..., 0] != 0) & (mean > 0)
        shift = np.log(np.where(known, self.mean, 1) / np.where(known, mean, 1))
        return features + shift[..., None]


@dataclass(frozen=True, eq=False)
class ResidualHeads:
    """One linear head a matrix and transition, shared by all blocks of the matrix.

    ``weights`` float64[2, B-1, F]: for the paper's form (F = 4) its ``w`` and ``a``, for moments F = 1; fitted to the
    logarithm of measured over predicted damage. ``confidence`` float64[2, B-1] in 0..1; ``low`` and ``high``
    float64[2, B-1]: bounds of the prediction. ``reference``: what moments are compared with, None: the paper's form.
    Raises ValueError for shapes that do not match, numbers that are not finite, or bounds that cross.
    """

    weights: np.ndarray
    confidence: np.ndarray
    low: np.ndarray
    high: np.ndarray
    reference: MomentsReference | None = None

    def __post_init__(self):
        for name in ("weights", "confidence", "low", "high"):
            array = np.array(getattr(self, name), float)
            shape = (*self.shape, self.features) if name == "weights" else self.shape
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"residual {name} must be finite and of shape {shape}, got {array.shape}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if (self.low > self.high).any() or (self.confidence < 0).any() or (self.confidence > 1).any():
            raise ValueError("residual heads need low <= high and a confidence within 0..1")
        if self.reference is not None and self.reference.mean.shape[1:] != self.shape[1:]:
            raise ValueError(f"residual heads have {self.shape[1]} transitions, not those of their reference")

    @property
    def form(self) -> str:
        """``paper`` or ``moments``."""
        return "paper" if self.reference is None else "moments"

    @property
    def features(self) -> int:
        """Numbers that a head reads, F."""
        return len(FEATURES) if self.reference is None else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """``(2, B-1)``."""
        return np.shape(self.confidence)

    def factor(self, features: np.ndarray, strength: float = 1.0, chances: np.ndarray | None = None) -> np.ndarray:
        """``eta = exp(alpha * c * clip(rho, low, high))``, float64[n, B-1].

        ``features`` float[n, 4], or float[n, B-1, 1] of moments; ``strength`` is ``alpha``. Blocks alternate between
        the two matrices. ``chances`` float64[K, n]: the texts that damage is of already, as in
        :meth:`MomentsReference.beyond`. ValueError for another shape.
        """
        features = np.asarray(features, float)
        shape = (self.features,) if self.reference is None else (self.shape[1], self.features)
        if features.shape[1:] != shape or not np.isfinite(features).all():
            wanted = ", ".join(map(str, ("n", *shape)))
            raise ValueError(f"residual features must be finite and of shape [{wanted}], got {features.shape}")
        if self.reference is not None and chances is not None:
            features = self.reference.beyond(features, chances)
        eta = np.empty((len(features), self.shape[1]), order="F")
        for matrix, weights in enumerate(self.weights):
            own = features[matrix::2]
            rho = own @ weights.T if self.reference is None else own[..., 0] * weights[:, 0]
            rho = np.clip(rho, self.low[matrix], self.high[matrix])
            eta[matrix::2] = np.exp(strength * self.confidence[matrix] * rho)
        return eta

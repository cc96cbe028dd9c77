"""Prompt residual: how much more, or less, one sequence suffers from few bits than calibration text did on average.

A transition ``j`` takes a block from width ``j+1`` of the table to width ``j``; its damage is the difference of the two
columns, here always a mean over the tokens routed to the expert. Heads predict ``rho``, the logarithm of a sequence's
damage over the average one, and the planner multiplies the damage of a transition by (paper, equations 5 and 6)

    eta = exp(alpha * c * clip(rho, low, high))         rho = weights . (mean norm, RMS norm, maximum norm, 1)

``c`` is the head's R² on sequences it was not fitted to, clipped to 0..1, and ``low``, ``high`` are quantiles of what
was seen. Norms are of what the matrix reads, over the tokens of the sequence that were routed to the expert, the first
two weighted by the gate: ``mean = sum g |x| / sum g``, ``RMS = sqrt(sum g |x|^2 / sum g)``.

Two forms are fitted. ``paper`` has the three norms. ``moments`` has one number: the logarithm of
``sum_k E[g^2 x_k^2] e_k`` over its average, where ``e_k = sum_rows r (W - W_b)^2`` is the error that column ``k`` of
the matrix carries to the layer's output, ``r`` being the weight of an output row there.

n sequences, L layers, E experts, 2 matrices, B widths.
"""

from typing import NamedTuple

import numpy as np

from calib.agreement import bootstrap
from calib.rows import Rows

# Fewer routed tokens say nothing about a sequence.
LEAST_TOKENS = 8
RIDGE = 1e-3
CLIP = (0.02, 0.98)


class Samples(NamedTuple):
    """Per sequence and expert. ``tokens`` and ``gates`` (sums) float64[n, L, E]; ``norms`` float64[n, L, E, 2, 3]: sums
    of ``g |x|`` and ``g |x|^2``, maximum of ``|x|``; ``damage`` and ``moments`` float64[n, L, E, 2, B], sums over
    routed tokens."""

    tokens: np.ndarray
    gates: np.ndarray
    norms: np.ndarray
    damage: np.ndarray
    moments: np.ndarray

    @classmethod
    def empty(cls, sequences: int, layers: int, experts: int, widths: int) -> "Samples":
        """All zeros."""
        shape = sequences, layers, experts
        zeros = np.zeros
        return cls(
            zeros(shape), zeros(shape), zeros((*shape, 2, 3)), zeros((*shape, 2, widths)), zeros((*shape, 2, widths))
        )

    def add(
        self, layer: int, expert: int, rows: Rows, inner: np.ndarray, damage: np.ndarray, energy: tuple[np.ndarray, ...]
    ) -> None:
        """Count a piece of routed tokens.

        ``inner`` float[C, m, I] is what ``down`` reads, ``damage`` float64[2, B, C, m] of each token, ``energy``
        (float64[B, H], float64[B, I]) from :func:`column_energy`.
        """
        at = rows.sequence, layer, expert
        used, gates = rows.used, np.where(rows.used, rows.gates, 0).astype(np.float64)
        np.add.at(self.tokens, at, used.sum(1))
        np.add.at(self.gates, at, gates.sum(1))
        np.add.at(self.damage, at, damage.sum(-1).transpose(2, 0, 1))
        for matrix, values in enumerate((rows.inputs, inner)):
            square = np.square(values, dtype=np.float64) * used[..., None]
            norm = np.sqrt(square.sum(-1))
            np.add.at(self.norms, (*at, matrix, 0), (gates * norm).sum(1))
            np.add.at(self.norms, (*at, matrix, 1), (gates * norm**2).sum(1))
            np.maximum.at(self.norms, (*at, matrix, 2), norm.max(1, initial=0))
            np.add.at(self.moments, (*at, matrix), np.einsum("cm,cmk->ck", gates**2, square) @ energy[matrix].T)

    def features(self) -> np.ndarray:
        """float64[n, L, E, 2, 4]: mean, RMS and maximum norm, and 1; zeros where a sequence did not use the expert."""
        gates = self.gates[..., None]
        mean, square = (
            np.divide(self.norms[..., i], gates, out=np.zeros_like(self.norms[..., i]), where=gates > 0) for i in (0, 1)
        )
        used = np.broadcast_to(gates > 0, mean.shape).astype(float)
        return np.stack([mean, np.sqrt(square), self.norms[..., 2], used], -1)


def column_energy(exact: tuple, widths: tuple, fisher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Error that each input column carries to the layer's output, ``(float64[B, H], float64[B, I])``.

    ``exact`` is ``(gate_up [2I, H], down [H, I])``, ``widths`` the same with a leading axis B; ``fisher`` float64[H].
    A row of ``down`` weighs ``fisher``, a row of ``gate_up`` what the column of ``down`` that follows it passes on.
    """
    gate_up, down = (np.asarray(w, np.float64) for w in exact)
    through = (fisher[:, None] * down**2).sum(0)
    rows = np.tile(through, gate_up.shape[0] // through.size), fisher
    return tuple(  # pyright: ignore[reportReturnType]
        np.einsum("r,brk->bk", weight, np.square(np.asarray(wide, np.float64) - matrix))
        for weight, wide, matrix in zip(rows, widths, (gate_up, down), strict=True)
    )


class Heads(NamedTuple):
    """``weights`` float64[2, B-1, F]; the rest float64[2, B-1]. ``held_out_r2`` clipped to 0..1 is ``confidence``."""

    weights: np.ndarray
    confidence: np.ndarray
    low: np.ndarray
    high: np.ndarray
    held_out_r2: np.ndarray

    def factor(self, features: np.ndarray, alpha: float = 1.0) -> np.ndarray:
        """``eta`` float64[..., 2, B-1] of ``features`` float64[..., 2, B-1 or 1, F]."""
        rho = (features * self.weights).sum(-1)
        return np.exp(alpha * self.confidence * np.clip(rho, self.low, self.high))


def transitions(sums: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mean damage of each transition on a routed token, float64[..., 2, B-1]; 0 without tokens."""
    steps = sums[..., :-1] - sums[..., 1:]
    count = tokens[..., None, None]
    return np.divide(steps, count, out=np.zeros_like(steps), where=count > 0)


def moments_feature(samples: Samples, fitted: np.ndarray) -> np.ndarray:
    """Log of a sequence's moment estimate over the average of those ``fitted`` bool[n]: [n, L, E, 2, B-1, 1]."""
    mean = transitions(samples.moments[fitted].sum(0), samples.tokens[fitted].sum(0))
    return _log_ratio(transitions(samples.moments, samples.tokens), mean)[..., None]


def fit_heads(features: np.ndarray, samples: Samples, fitted: np.ndarray) -> Heads:
    """Heads by ridge regression on the sequences ``fitted`` bool[n], judged on the others.

    ``features`` float64[n, L, E, 2, B-1 or 1, F]. Samples count by their tokens; those with fewer than LEAST_TOKENS,
    or without damage, are left out. Without samples a head predicts 0 with confidence 0.
    """
    target, known = _targets(samples, fitted)
    weight = np.broadcast_to(samples.tokens[..., None, None], target.shape) * known
    features = np.broadcast_to(features, (*target.shape, features.shape[-1]))
    shape = target.shape[-2:]
    heads = Heads(np.zeros((*shape, features.shape[-1])), *(np.zeros(shape) for _ in range(4)))
    for head in np.ndindex(shape):
        own, held = weight[(fitted, ..., *head)], weight[(~fitted, ..., *head)]
        x, y = features[(..., *head, slice(None))], target[(..., *head)]
        if not (own > 0).sum() > x.shape[-1] or not (held > 0).any():
            continue
        heads.weights[head] = _ridge(x[fitted][own > 0], y[fitted][own > 0], own[own > 0])
        heads.low[head], heads.high[head] = np.quantile(y[fitted][own > 0], CLIP)
        rho = np.clip(x[~fitted][held > 0] @ heads.weights[head], heads.low[head], heads.high[head])
        seen, w = y[~fitted][held > 0], held[held > 0]
        spread = (w * (seen - np.average(seen, weights=w)) ** 2).sum()
        heads.held_out_r2[head] = 1 - (w * (seen - rho) ** 2).sum() / spread if spread > 0 else 0.0
    np.clip(heads.held_out_r2, 0, 1, out=heads.confidence)
    return heads


def judge(samples: Samples, eta: np.ndarray, fitted: np.ndarray, seed: int = 0) -> dict:
    """Does ``eta`` float64[n, L, E, 2, B-1] predict the damage of sequences that were not ``fitted``? JSON-ready.

    Error of a sequence: ``sum |predicted - measured| / sum measured`` over blocks and transitions, where predicted is
    the average damage a routed token, times its tokens, times eta (``on``) or 1 (``off``). ``change`` is on minus off,
    paired, with a 95 % bootstrap interval over sequences; ``helps`` where that is below 0.
    """
    _, known = _targets(samples, fitted)
    count = samples.tokens[..., None, None] * known
    mean = transitions(samples.damage[fitted].sum(0), samples.tokens[fitted].sum(0))
    measured = transitions(samples.damage, samples.tokens)
    error = lambda factor: np.abs(mean * factor - measured) * count  # noqa: E731
    total = (measured * count)[~fitted].sum((1, 2, 3, 4))
    on, off = ((error(f)[~fitted].sum((1, 2, 3, 4)) / total)[total > 0] for f in (eta, 1.0))
    if not on.size:
        return {"sequences": 0, "off": None, "on": None, "change": None, "change_95": None, "helps": False}
    low, high = bootstrap(lambda i: (on - off)[i].mean(-1), on.size, seed)
    return {
        "sequences": int(on.size),
        "off": float(off.mean()),
        "on": float(on.mean()),
        "change": float((on - off).mean()),
        "change_95": [low, high],
        "helps": bool(high < 0),
    }


def split(sources: np.ndarray, seed: int, share: float = 2 / 3) -> np.ndarray:
    """Which sequences to fit on, bool[n]: at random ``share`` of each source (int[n]), one of two at most."""
    rng, fitted = np.random.default_rng(seed), np.zeros(len(sources), bool)
    for source in np.unique(sources):
        own = rng.permutation(np.flatnonzero(sources == source))
        fitted[own[: max(1, min(round(share * own.size), own.size - 1))]] = True
    return fitted


def _targets(samples: Samples, fitted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log of each sequence's damage over the average, and which are known: [n, L, E, 2, B-1]."""
    mean = transitions(samples.damage[fitted].sum(0), samples.tokens[fitted].sum(0))
    own = transitions(samples.damage, samples.tokens)
    known = (samples.tokens >= LEAST_TOKENS)[..., None, None] & (own > 0) & (mean > 0)
    return _log_ratio(own, mean), known


def _log_ratio(own: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """``log(own / mean)``, 0 where one of them is not positive."""
    known = (own > 0) & (mean > 0)
    return np.log(np.where(known, own, 1) / np.where(known, mean, 1))


def _ridge(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted ridge regression of ``y`` [s] on ``x`` [s, F] in the units of ``x``; a constant column is not shrunk."""
    weight = weight / weight.sum()
    mean = weight @ x
    scale = np.sqrt(weight @ (x - mean) ** 2)
    varies = scale > 1e-9 * np.abs(mean)
    z = (x - mean)[:, varies] / scale[varies]
    slope = np.linalg.solve(z.T @ (weight[:, None] * z) + RIDGE * np.eye(z.shape[1]), z.T @ (weight * (y - weight @ y)))
    out = np.zeros(x.shape[1])
    out[varies] = slope / scale[varies]
    constant = np.flatnonzero(~varies & (mean != 0))
    if constant.size:
        out[constant[0]] = (weight @ y - mean[varies] @ out[varies]) / mean[constant[0]]
    return out

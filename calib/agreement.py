"""How well predicted damage agrees with measured loss: rank correlation, slopes and their bootstrap intervals.

``predicted`` and ``measured`` are float64[n], one entry a change or a plan. Intervals resample the entries (and, where
two predictors are compared, the same entries for both).
"""

from collections.abc import Callable

import numpy as np

RESAMPLES = 1000


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks float64[..., n] along the last axis, ties given their mean rank."""
    values = np.atleast_2d(values)
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    place = np.arange(values.shape[-1], dtype=np.float64)
    new = np.diff(ordered, axis=-1, prepend=np.nan) != 0
    first = np.maximum.accumulate(np.where(new, place, 0), axis=-1)
    ends = np.diff(ordered, axis=-1, append=np.nan) != 0
    last = np.minimum.accumulate(np.where(ends, place, np.inf)[..., ::-1], axis=-1)[..., ::-1]
    out = np.empty_like(ordered, np.float64)
    np.put_along_axis(out, order, (first + last) / 2, -1)
    return out


def spearman(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Spearman rank correlation along the last axis, float64[...]; nan where one side has no spread."""
    a, b = (r - r.mean(-1, keepdims=True) for r in (ranks(predicted), ranks(measured)))
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        result = np.where(scale > 0, (a * b).sum(-1) / scale, np.nan)
    return result.reshape(np.shape(predicted)[:-1])


def slope_through_origin(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Least-squares ``measured = slope * predicted``: 1 where the prediction has the unit of what is measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (predicted * measured).sum(-1) / (predicted * predicted).sum(-1)


def line(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float, float]:
    """``(slope, intercept, R²)`` of the least-squares line; nan where the prediction has no spread."""
    x, y = predicted - predicted.mean(), measured - measured.mean()
    if not (x * x).sum() > 0 or not (y * y).sum() > 0:
        return float("nan"), float("nan"), float("nan")
    slope = float((x * y).sum() / (x * x).sum())
    residual = y - slope * x
    return (
        slope,
        float(measured.mean() - slope * predicted.mean()),
        1 - float((residual**2).sum() / (y * y).sum()),
    )


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], n: int, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % percentile interval of ``statistic(index int64[resamples, n]) -> float64[resamples]``; nan is left out."""
    index = np.random.default_rng(seed).integers(0, n, (resamples, n))
    values = np.asarray(statistic(index), np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return float("nan"), float("nan")
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def agreement(predicted: np.ndarray, measured: np.ndarray, seed: int = 0) -> dict:
    """All figures of one predictor, JSON-ready; None stands for what cannot be computed (a predictor without spread).

    ``{"count", "spearman", "spearman_95", "slope_origin", "slope_origin_95", "slope", "intercept", "r2", "r2_95"}``.
    ValueError for fewer than three entries or entries that are not finite.
    """
    predicted, measured = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    if predicted.shape != measured.shape or predicted.ndim != 1 or predicted.size < 3:
        raise ValueError(f"agreement takes two lists of at least 3, got {predicted.shape} and {measured.shape}")
    if not np.isfinite(predicted).all() or not np.isfinite(measured).all():
        raise ValueError("agreement takes finite numbers only; a table or a measurement is damaged")
    n = predicted.size
    pairs = lambda f: bootstrap(lambda i: f(predicted[i], measured[i]), n, seed)  # noqa: E731
    slope, intercept, r2 = line(predicted, measured)
    figures = {
        "count": n,
        "spearman": float(spearman(predicted, measured)),
        "spearman_95": pairs(spearman),
        "slope_origin": float(slope_through_origin(predicted, measured)),
        "slope_origin_95": pairs(slope_through_origin),
        "slope": slope,
        "intercept": intercept,
        "r2": r2,
        "r2_95": pairs(lambda p, m: np.array([line(a, b)[2] for a, b in zip(p, m, strict=True)])),
    }
    return {key: _plain(value) for key, value in figures.items()}


def spearman_gain(first: np.ndarray, second: np.ndarray, measured: np.ndarray, seed: int = 0) -> dict:
    """How much better ``first`` ranks than ``second``, paired: ``{"gain", "gain_95"}``."""
    gain = lambda i: spearman(first[i], measured[i]) - spearman(second[i], measured[i])  # noqa: E731
    low_high = bootstrap(gain, measured.size, seed)
    return {"gain": _plain(float(gain(np.arange(measured.size)))), "gain_95": _plain(low_high)}


def reliability(samples: np.ndarray, seed: int = 0, splits: int = 50) -> float:
    """Highest rank correlation that measurement noise allows any predictor, from ``samples`` float64[n, windows].

    Random halves of the windows are ranked against each other; the Spearman-Brown formula carries their correlation
    to all windows, and its root is the ceiling of a perfect predictor. nan with fewer than two windows.
    """
    windows = samples.shape[1]
    if windows < 2:
        return float("nan")
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(splits):
        order = rng.permutation(windows)
        half = windows // 2
        found.append(spearman(samples[:, order[:half]].mean(1), samples[:, order[half : 2 * half]].mean(1)))
    r = float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")
    return float(np.sqrt(max(2 * r / (1 + r), 0))) if np.isfinite(r) else r


def _plain(value):
    """Floats of JSON, which has no nan."""
    if isinstance(value, tuple):
        return None if any(not np.isfinite(v) for v in value) else list(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value

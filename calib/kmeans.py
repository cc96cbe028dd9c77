"""Nested weighted one-dimensional k-means over many groups at once: a near-optimal seed, then exact two-way splits.

Every group (a row, or a few rows that share a table) is sorted once; from then on a cluster is an interval of the
sorted group and a clustering is its borders. Nothing is random:

* seed   ``2**seed`` intervals within a few thousandths of the optimum (:mod:`calib.kmeans_seed`);
* split  per extra bit every cluster is cut at its best point, found by looking at all of them.

Rules for clusters that have nothing to say (those of the Any-Precision reference): an empty child inherits its
parent's centroid; one element goes left; two elements go one each way; a cluster, or a group, without weight counts
its elements equally. Where one element has all the weight the reference sends the whole cluster left; here the
others are split among themselves, which costs the weighted one nothing.
"""

from dataclasses import dataclass

import numpy as np

from calib.kmeans_loops import best_cuts, prefix
from calib.kmeans_seed import seed_borders

# Weights are scaled to mean 1 per group and kept above this, which is what prefix sums in float64 resolve. So tiny
# Fisher values still order their neighbourhood, values that calibration never weighed are clustered among themselves
# instead of anywhere, and the objective moves by at most this fraction.
WEIGHT_FLOOR = 1e-8


@dataclass(frozen=True)
class Sorted:
    """Groups sorted by value.

    ``x`` and ``w`` float64[R, K] (values about the group's mean, weights of mean 1), ``shift`` float64[R, 1] the means,
    ``order`` int64[R, K] the place of each sorted value in the flat input.
    """

    x: np.ndarray
    w: np.ndarray
    shift: np.ndarray
    order: np.ndarray


def nested_kmeans(
    values: np.ndarray, weights: np.ndarray | None, seed: int, parent: int
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Nested clusterings of each row of ``values``.

    ``values`` float32[R, K], ``weights`` float32[R, K] (>= 0) or None for equal weights. Returns the codes
    uint8[R, K] at ``parent`` bits (rank order of the clusters; the code at b bits is ``code >> (parent - b)``) and the
    centroids ``{b: float64[R, 2**b]}``, ascending, for b = seed..parent. Inputs must be finite.
    """
    groups = sort_groups(values, weights)
    wx = groups.w * groups.x
    sums = prefix(groups.w), prefix(wx)
    borders = seed_borders(groups.x, groups.w, sums, seed)
    centroids, weights = _means(groups.w, wx, borders, _neighbour(groups.x, borders))
    tables = {seed: centroids + groups.shift}
    for bits in range(seed + 1, parent + 1):
        cuts = best_cuts(groups.x, groups.w, sums[0], borders, centroids, weights)
        ends = np.stack([cuts, borders[:, 1:]], axis=2).reshape(len(cuts), -1)
        borders = np.concatenate([borders[:, :1], ends], axis=1)
        centroids, weights = _means(groups.w, wx, borders, np.repeat(centroids, 2, axis=1))
        tables[bits] = centroids + groups.shift
    own = np.tile(np.arange(1 << parent, dtype=np.uint8), len(values))
    codes = np.empty(values.size, np.uint8)
    codes[groups.order.ravel()] = np.repeat(own, np.diff(borders, axis=1).ravel())
    # Means are ascending up to the last rounding; the promise is exact.
    ascending = {bits: np.maximum.accumulate(table, axis=1) for bits, table in tables.items()}
    return codes.reshape(values.shape), ascending


def sort_groups(values: np.ndarray, weights: np.ndarray | None) -> Sorted:
    """Sort each group; equal values keep their column order on every machine."""
    values = np.ascontiguousarray(values, np.float32) + np.float32(0)  # -0 becomes 0: they are one value
    rows, cols = values.shape
    # One unsigned integer per value, its bits flipped so that integers order like floats, with the column below it:
    # all keys differ, so that the fastest sort there is gives the one possible answer.
    raw = values.view(np.int32)
    keys = ((raw ^ (raw >> 31 | np.int32(-1 << 31))).view(np.uint32)).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(cols, dtype=np.uint64)
    keys.sort(axis=1)
    high = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    x = (high ^ (~high >> 31 | np.int32(-1 << 31))).view(np.float32).astype(np.float64)
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    order += np.arange(rows)[:, None] * cols
    shift = x.mean(axis=1, keepdims=True)
    x -= shift
    if weights is None:
        return Sorted(x, np.ones((rows, cols)), shift, order)
    w = np.ascontiguousarray(weights).ravel().take(order).astype(np.float64, copy=False)
    total = w.sum(axis=1, keepdims=True)
    w = np.where(total > 0, w * (cols / np.where(total > 0, total, 1.0)), 1.0)
    np.maximum(w, WEIGHT_FLOOR, out=w)
    return Sorted(x, w, shift, order)


def _means(w: np.ndarray, wx: np.ndarray, borders: np.ndarray, empty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centroids and weights float64[R, k] of the intervals; an empty one has the centroid of ``empty`` float64[R, k].

    Summed interval by interval: a difference of prefix sums would cost clusters of tiny weight their digits.
    """
    filled = np.flatnonzero(np.diff(borders, axis=1))
    start = (borders[:, :-1] + np.arange(len(w))[:, None] * w.shape[1]).ravel()[filled]
    means, weights = empty.copy(), np.zeros_like(empty)
    weights.ravel()[filled] = np.add.reduceat(w.ravel(), start)
    means.ravel()[filled] = np.add.reduceat(wx.ravel(), start) / weights.ravel()[filled]
    return means, weights


def _neighbour(x: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """The value float64[R, k] just below the end of each interval, what an empty seed cluster takes as centroid."""
    at = np.maximum(borders[:, 1:] - 1, 0) + np.arange(len(x))[:, None] * x.shape[1]
    return x.ravel().take(at)

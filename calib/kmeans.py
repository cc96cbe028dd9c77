"""Weighted one-dimensional k-means over many groups at once: a near-optimal seed, then exact two-way splits.

Every group (a row, or a few rows that share a table) is sorted once; from then on a cluster is an interval of the
sorted group and its sums come from prefix sums. Nothing is random:

* seed   the best ``2**seed`` intervals over at most ``BINS`` candidate borders, found by dynamic programming (exact
         where a group has no more values than bins), then Lloyd steps on all values;
* split  per extra bit every cluster is cut at its best point, found by looking at all of them.

Rules for clusters that have nothing to say (those of the Any-Precision reference): an empty child inherits its
parent's centroid; one element goes left; two elements go one each way; a cluster, or a group, without weight counts
its elements equally. Where one element has all the weight the reference sends the whole cluster left; here the
others are split among themselves, which costs the weighted one nothing.
"""

from dataclasses import dataclass

import numpy as np

BINS = 64
LLOYD_STEPS = 50

# The widest seed that the dynamic program handles; wider seeds start from it, split, and are refined by Lloyd.
DP_BITS = 3

# Weights are scaled to mean 1 per group and kept above this, which is what prefix sums in float64 resolve. So tiny
# Fisher values still order their neighbourhood, values that calibration never weighed are clustered among themselves
# instead of anywhere, and the objective moves by at most this fraction.
WEIGHT_FLOOR = 1e-8


@dataclass
class Sorted:
    """Groups sorted by value: the working state of one call.

    ``x`` and ``w`` float64[R, K] (values about the group's mean, weights of mean 1), ``shift`` float64[R, 1] the means,
    ``order`` int64[R, K] the column of each sorted value, ``label`` int64[R*K] the cluster of each value, numbered
    through all groups (group ``r`` owns clusters ``r*k`` to ``r*k + k-1``).
    """

    x: np.ndarray
    w: np.ndarray
    shift: np.ndarray
    order: np.ndarray
    label: np.ndarray

    @property
    def groups(self) -> int:
        """Number of groups R."""
        return self.x.shape[0]


def nested_kmeans(
    values: np.ndarray, weights: np.ndarray | None, seed: int, parent: int
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Nested clusterings of each row of ``values``.

    ``values`` float32[R, K], ``weights`` float32[R, K] (>= 0) or None for equal weights. Returns the codes
    uint8[R, K] at ``parent`` bits (rank order of the clusters; the code at b bits is ``code >> (parent - b)``) and the
    centroids ``{b: float64[R, 2**b]}``, ascending, for b = seed..parent. Inputs must be finite.
    """
    state = _sort(values, weights)
    centroids = _seed(state, seed)
    tables = {seed: centroids + state.shift}
    for bits in range(seed + 1, parent + 1):
        centroids = _split(state, centroids)
        tables[bits] = centroids + state.shift
    codes = np.empty(values.shape, np.uint8)
    own = (state.label & ((1 << parent) - 1)).astype(np.uint8).reshape(values.shape)
    np.put_along_axis(codes, state.order, own, axis=1)
    # Means are ascending up to the last rounding; the promise is exact.
    return codes, {bits: np.maximum.accumulate(table, axis=1) for bits, table in tables.items()}


def _sort(values: np.ndarray, weights: np.ndarray | None) -> Sorted:
    """Sort each group; equal values keep their column order on every machine."""
    values = np.ascontiguousarray(values, np.float32) + np.float32(0)  # -0 becomes 0: they are one value
    rows, cols = values.shape
    # One unsigned integer per value, sign bit flipped into order, with the column below it: all keys differ, so that
    # the fastest sort there is gives the one possible answer.
    raw = values.view(np.uint32)
    ordered = np.where(raw >> 31, ~raw, raw | np.uint32(1 << 31))
    keys = (ordered.astype(np.uint64) << np.uint64(32)) | np.arange(cols, dtype=np.uint64)
    keys.sort(axis=1)
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    x = np.take_along_axis(values, order, axis=1).astype(np.float64)
    shift = x.mean(axis=1, keepdims=True)
    x -= shift
    if weights is None:
        w = np.ones((rows, cols))
    else:
        w = np.take_along_axis(np.asarray(weights, np.float64), order, axis=1)
        total = w.sum(axis=1, keepdims=True)
        w = np.where(total > 0, w * (cols / np.where(total > 0, total, 1.0)), 1.0)
        np.maximum(w, WEIGHT_FLOOR, out=w)
    return Sorted(x, w, shift, order, np.repeat(np.arange(rows), cols))


def _prefix(values: np.ndarray) -> np.ndarray:
    """Prefix sums along the last axis with a leading zero: float64[R, K+1]."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _seed(state: Sorted, bits: int) -> np.ndarray:
    """First clustering into ``2**bits`` intervals; sets labels, returns centroids float64[R, 2**bits]."""
    start = min(bits, DP_BITS)
    borders = _best_intervals(state, 1 << start)
    centroids = _lloyd(state, borders)
    for _ in range(start, bits):
        centroids = _split(state, centroids)
    if bits > start:
        counts = np.bincount(state.label, minlength=state.groups << bits).reshape(state.groups, 1 << bits)
        borders = np.concatenate([np.zeros((state.groups, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
        centroids = _lloyd(state, borders)
    return centroids


def _best_intervals(state: Sorted, clusters: int) -> np.ndarray:
    """Borders int64[R, clusters+1] of the intervals with the least weighted error over the candidate borders."""
    cut = _candidates(state)
    rows, bins = cut.shape[0], cut.shape[1] - 1
    mass = np.take_along_axis(_prefix(state.w), cut, axis=1)
    moment = np.take_along_axis(_prefix(state.w * state.x), cut, axis=1)
    # gain[r, j, i]: what the mean of values cut[i]..cut[j] explains; least error is most gain.
    width = mass[:, :, None] - mass[:, None, :]
    gain = moment[:, :, None] - moment[:, None, :]
    np.square(gain, out=gain)
    np.divide(gain, width, out=gain, where=width > 0)
    gain[~(width > 0)] = 0.0
    gain[:, ~np.tri(bins + 1, dtype=bool)] = -np.inf
    best = gain[:, :, 0]
    choices = []
    for step in range(clusters - 1):
        if step == clusters - 2:
            gain = gain[:, -1:, :]  # the last interval ends where the group ends
        total = best[:, None, :] + gain
        choice = total.argmax(axis=2)
        best = np.take_along_axis(total, choice[:, :, None], axis=2)[:, :, 0]
        choices.append(choice)
    borders = np.zeros((rows, clusters + 1), np.int64)
    at = np.zeros((rows, 1), np.int64)
    borders[:, -1] = cut[:, -1]
    for index, choice in zip(range(clusters - 1, 0, -1), reversed(choices), strict=True):
        at = np.take_along_axis(choice, at, axis=1)
        borders[:, index : index + 1] = np.take_along_axis(cut, at, axis=1)
    return borders


def _candidates(state: Sorted) -> np.ndarray:
    """Ascending candidate borders int64[R, bins+1] from 0 to K: every border of a short group, else a third each
    evenly spread over rank, value and weight."""
    rows, cols = state.x.shape
    if cols <= BINS:
        return np.broadcast_to(np.arange(cols + 1), (rows, cols + 1))
    share = BINS // 3
    fractions = np.arange(1, share + 1) / (share + 1)
    by_rank = np.broadcast_to((fractions * cols).astype(np.int64), (rows, share))
    low, high = state.x[:, :1], state.x[:, -1:]
    by_value = _search(state.x, low + fractions * (high - low))
    mass = np.cumsum(state.w, axis=1)
    by_weight = _search(mass, fractions * mass[:, -1:])
    ends = np.broadcast_to([0, cols], (rows, 2))
    return np.sort(np.concatenate([ends, by_rank, by_value, by_weight], axis=1), axis=1)


def _search(sorted_rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Left insertion points int64[R, m] of ``targets[R, m]`` in each ascending row: one bisection for all."""
    cols = sorted_rows.shape[1]
    found = np.zeros(targets.shape, np.int64)
    step = 1 << cols.bit_length()
    while step := step >> 1:
        probe = found + step
        inside = np.take_along_axis(sorted_rows, np.minimum(probe, cols) - 1, axis=1) < targets
        found = np.where((probe <= cols) & inside, probe, found)
    return found


def _lloyd(state: Sorted, borders: np.ndarray) -> np.ndarray:
    """Move borders to the midpoints of the means until they repeat; sets labels, returns centroids.

    An empty cluster keeps its centroid (at first: that of its left neighbour).
    """
    rows, clusters = state.groups, borders.shape[1] - 1
    mass, moment = _prefix(state.w), _prefix(state.w * state.x)
    centroids = np.full((rows, clusters), np.nan)
    for _ in range(LLOYD_STEPS):
        centroids = np.clip(_means(borders, mass, moment, centroids), state.x[:, :1], state.x[:, -1:])
        moved = borders.copy()
        moved[:, 1:-1] = _search(state.x, (centroids[:, 1:] + centroids[:, :-1]) / 2)
        if np.array_equal(moved, borders):
            break
        borders = moved
    state.label = np.repeat(np.arange(rows * clusters), np.diff(borders, axis=1).ravel())
    return _exact_means(state, centroids)


def _means(borders: np.ndarray, mass: np.ndarray, moment: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Centroids of the intervals between ``borders``; an empty one keeps the one ``before``."""
    at = lambda sums: np.diff(np.take_along_axis(sums, borders, axis=1), axis=1)  # noqa: E731
    weight, filled = at(mass), np.diff(borders, axis=1) > 0
    means = np.where(filled, at(moment) / np.where(filled, weight, 1.0), before)
    unset = np.isnan(means)
    if unset.any():
        index = np.where(unset, -1, np.arange(means.shape[1]))
        left = np.maximum.accumulate(index, axis=1)
        # A group that begins with empty clusters borrows from its first filled one.
        first = np.argmax(index >= 0, axis=1)[:, None]
        means = np.take_along_axis(means, np.where(left < 0, first, left), axis=1)
    return np.maximum.accumulate(means, axis=1)


def _split(state: Sorted, centroids: np.ndarray) -> np.ndarray:
    """Cut every cluster in two at its best point; updates labels, returns centroids float64[R, 2k]."""
    label, x, w = state.label, state.x.ravel(), state.w.ravel()
    total = centroids.size
    count = np.bincount(label, minlength=total)
    weight = np.bincount(label, w, total)
    mean = centroids.ravel()
    # Running sums inside each cluster, up to and with each element. D is the left half's moment about the cluster's
    # mean, so that gain = D^2 (1/W_left + 1/W_right) suffers no cancellation between large squares.
    mass = np.cumsum(w)
    offset = x - mean[label]
    deviation = np.cumsum(w * offset)
    start = np.cumsum(count) - count
    before = np.where(start > 0, start - 1, 0)
    base = lambda sums: np.where(start > 0, sums[before], 0.0)  # noqa: E731
    left = mass - base(mass)[label]
    right = weight[label] - left
    deviation -= base(deviation)[label]
    # Rounding leaves a residue where a half has no weight; a real half has at least the floor.
    valid = (left > WEIGHT_FLOOR / 2) & (right > WEIGHT_FLOOR / 2)
    gain = np.full(x.size, -1.0)
    np.square(deviation, out=deviation)
    np.multiply(left, right, out=left)
    np.divide(deviation, left, out=gain, where=valid)
    filled = np.flatnonzero(count)
    top = np.full(total, -1.0)
    top[filled] = np.maximum.reduceat(gain, start[filled])
    first = start + count  # nothing to gain: all elements go left
    hits = np.flatnonzero((gain == top[label]) & valid)[::-1]
    first[label[hits]] = hits + 1  # written from the right: the leftmost best cut stays
    pair = np.flatnonzero(count == 2)
    first[pair] = start[pair] + 1
    child = 2 * label + (np.arange(x.size) >= first[label])
    state.label = child
    return _exact_means(state, np.repeat(centroids, 2, axis=1))


def _exact_means(state: Sorted, empty: np.ndarray) -> np.ndarray:
    """Centroids of the labelled clusters, shaped like ``empty``, which gives those of empty clusters.

    Summed cluster by cluster: a difference of prefix sums would cost clusters of tiny weight their digits.
    """
    w = state.w.ravel()
    weight = np.bincount(state.label, w, empty.size)
    moment = np.bincount(state.label, w * state.x.ravel(), empty.size)
    filled = weight > 0
    return np.where(filled, moment / np.where(filled, weight, 1.0), empty.ravel()).reshape(empty.shape)

"""The loops of nested k-means over many sorted groups at once: in C++ where that is built, else in NumPy.

Both do the same IEEE operations in the same order, so that the same weights give the same bytes with and without a
compiler. What NumPy sums pairwise is not here.

``x`` float64[R, K] are the values of the groups, ascending along each row, ``sums`` prefix sums float64[R, K+1] of
their weights and of their weighted values. Borders and places are int64, within 0..K. All inputs are finite.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import numpy as np

from calib import kmeans_native

Loop = TypeVar("Loop", bound=Callable)
Sums = tuple[np.ndarray, np.ndarray]


def native_if_built(loop: Loop) -> Loop:
    """``loop``, or its namesake in :mod:`calib.kmeans_native` where the library is built."""

    @wraps(loop)
    def chosen(*args):
        built = kmeans_native.library() is not None
        return (getattr(kmeans_native, loop.__name__) if built else loop)(*args)

    return chosen  # type: ignore[return-value]


@native_if_built
def prefix(values: np.ndarray) -> np.ndarray:
    """Prefix sums of ``values`` float64[R, K] along each row with a leading zero: float64[R, K+1]."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


@native_if_built
def search(sorted_rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Left insertion points int64[R, m] of ``targets`` float64[R, m] in each ascending row of float64[R, n]."""
    return np.stack([row.searchsorted(target) for row, target in zip(sorted_rows, targets, strict=True)])


@native_if_built
def best_path(sums: Sums, places: np.ndarray) -> np.ndarray:
    """Borders int64[R, k+1] with the least weighted error where border j is one of ``places[:, j]``.

    ``places`` int64[R, k-1, m] ascend. Of equal ones the first is taken.
    """
    rows, inner, _ = places.shape
    total = [table[:, -1:] for table in sums]
    mass, moment = (row_take(table, places) for table in sums)
    best = _gain(mass[:, 0], moment[:, 0])
    choices, gain = [], None
    for j in range(1, inner):
        if gain is None or places.strides[1]:  # else all borders share their places, and these their gains
            gain = _gain(mass[:, j, :, None] - mass[:, j - 1, None], moment[:, j, :, None] - moment[:, j - 1, None])
        sum_to = gain + best[:, None]
        choices.append(sum_to.argmax(axis=2))
        best = row_take(sum_to.reshape(-1, sum_to.shape[2]), choices[-1].reshape(-1, 1)).reshape(best.shape)
    best = best + _gain(total[0] - mass[:, -1], total[1] - moment[:, -1])
    borders = np.zeros((rows, inner + 2), np.int64)
    borders[:, -1] = sums[0].shape[1] - 1
    choice = best.argmax(axis=1)[:, None]
    for j in range(inner - 1, -1, -1):
        borders[:, j + 1 : j + 2] = row_take(places[:, j], choice)
        if j:
            choice = row_take(choices[j - 1], choice)
    return borders


@native_if_built
def lloyd(x: np.ndarray, sums: Sums, borders: np.ndarray, steps: int) -> np.ndarray:
    """Move borders int64[R, k+1] to the midpoints of the means, until they repeat or so many times; an empty cluster
    has the mean of its left neighbour, or the first value."""
    for _ in range(steps):
        mass, moment = (np.diff(row_take(table, borders), axis=1) for table in sums)
        means = np.divide(moment, mass, out=np.full_like(mass, -np.inf), where=mass > 0)
        means = np.clip(np.maximum.accumulate(means, axis=1), x[:, :1], x[:, -1:])
        moved = borders.copy()
        moved[:, 1:-1] = search(x, (means[:, 1:] + means[:, :-1]) / 2)
        if np.array_equal(moved, borders):
            break
        borders = moved
    return borders


@native_if_built
def best_cuts(
    x: np.ndarray, w: np.ndarray, mass: np.ndarray, borders: np.ndarray, centroids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The leftmost best place int64[R, k] to cut each cluster in two; its end where it has less than two values.

    ``w`` float64[R, K] are the values' weights, ``mass`` their prefix sums, ``centroids`` and ``weights`` float64[R, k]
    those of the clusters between ``borders`` int64[R, k+1].
    """
    rows, cols = x.shape
    count = np.diff(borders, axis=1)
    filled = np.flatnonzero(count)
    start = (borders[:, :-1] + np.arange(rows)[:, None] * cols).ravel()[filled]
    size = count.ravel()[filled]
    end = start + size
    spread = lambda of_cluster: np.repeat(of_cluster.ravel()[filled], size).reshape(rows, cols)  # noqa: E731
    total = row_take(mass, borders[:, 1:])
    # The left part's moment about the cluster's mean, D: gain = D^2 (1/W_left + 1/W_right) suffers no cancellation
    # between large squares. Over a whole cluster D is zero, so one running sum serves all of a group.
    gain = x - spread(centroids)
    gain *= w
    np.cumsum(gain, axis=1, out=gain)
    np.square(gain, out=gain)
    left = mass[:, 1:] - spread(total - weights)
    left *= spread(total) - mass[:, 1:]
    last = end - 1
    left.ravel()[last] = 1.0
    gain /= left
    gain.ravel()[last] = -1.0  # no cut there
    top = np.maximum.reduceat(gain.ravel(), start)
    hits = np.flatnonzero(gain == np.repeat(top, size).reshape(rows, cols))[::-1]
    first = end.copy()
    first[np.searchsorted(start, hits, side="right") - 1] = hits + 1  # from the right: the leftmost best cut stays
    cuts = borders[:, 1:].copy()
    cuts.ravel()[filled] = first - filled // count.shape[1] * cols
    return cuts


def row_take(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``table[r, index[r, ...]]`` of every row r: ``table`` [R, n], ``index`` int64[R, ...]."""
    offset = np.arange(len(table)).reshape(-1, *(1,) * (index.ndim - 1)) * table.shape[1]
    return table.ravel().take(index + offset)


def _gain(mass: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """What the means of intervals explain: least error is most gain. Empty intervals explain nothing, those that run
    backwards are forbidden."""
    gain = np.square(moment)
    np.divide(gain, mass, out=gain, where=mass != 0)
    np.copyto(gain, -np.inf, where=mass < 0)
    return gain

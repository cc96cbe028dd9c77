"""The seed clustering: nearly the best ``2**b`` intervals of sorted, weighted groups, all groups at once.

Error is smallest where every cluster carries the same share of the cube root of the error density (Panter and Dite
1951), so quantiles of such a measure are where borders are sought. Then

1. up to 8 clusters: dynamic programming over ``BINS`` candidates for every border, evenly spread over value and over
   the measure; twice the clusters start from the borders found so far, each cluster halved by the measure;
2. a few times, or until nothing moves: dynamic programming in which every border may move to where its neighbours are
   or between them (a cluster can vanish at one end and appear at the other), then Lloyd steps.

Groups with hardly more values than clusters are solved exactly.
"""

import numpy as np

from calib.kmeans_loops import Sums, best_path, lloyd, prefix, row_take, search

BINS = 64  # candidate borders of a global search, and how many more values than clusters are solved exactly
LLOYD_STEPS = 6

# Clusterings of up to 2**GLOBAL_BITS begin with a search over all candidates and need little after it.
GLOBAL_BITS = 3
ROUNDS_AFTER_GLOBAL = 1
ROUNDS = 12
ROUNDS_BETWEEN = 2

# How far borders look in one round: in eighths of their neighbours' clusters, and in single values.
REACH = np.arange(-16, 17) / 8
REACH_AFTER_GLOBAL = REACH[::2]
STEPS = np.array([-2, -1, 1, 2])


def seed_borders(x: np.ndarray, w: np.ndarray, sums: Sums, bits: int) -> np.ndarray:
    """Borders int64[R, 2**bits + 1], from 0 to K, of the intervals of each row of ``x`` float64[R, K].

    ``x`` ascends along each row and is centred; ``w`` float64[R, K] > 0 are weights of mean 1; ``sums`` prefix sums
    float64[R, K+1] of ``w`` and of ``w * x``.
    """
    rows, cols = x.shape
    clusters = 1 << bits
    spare = max(cols - clusters, 0)
    if spare <= BINS:  # no cluster need be empty, so every border has few places
        every = np.minimum(np.arange(1, clusters)[:, None] + np.arange(spare + 1), cols)
        return best_path(sums, np.broadcast_to(every, (rows, *every.shape)))
    measure = _measure(x, w)
    start = min(bits, GLOBAL_BITS)
    places = _candidates(x, measure)[:, None]
    borders = best_path(sums, np.broadcast_to(places, (rows, (1 << start) - 1, places.shape[2])))
    borders = _improved(x, sums, borders, REACH_AFTER_GLOBAL, ROUNDS_AFTER_GLOBAL)
    for level in range(start + 1, bits + 1):
        rounds = ROUNDS if level == bits else ROUNDS_BETWEEN
        borders = _improved(x, sums, _halved(borders, measure), REACH, rounds)
    return borders


def _improved(x: np.ndarray, sums: Sums, borders: np.ndarray, reach: np.ndarray, rounds: int) -> np.ndarray:
    """Borders after so many rounds of windows and Lloyd steps; a row whose borders stay is done."""
    borders = lloyd(x, sums, borders, LLOYD_STEPS)
    moving = np.arange(len(x))
    for _ in range(rounds):
        own = sums[0][moving], sums[1][moving]
        moved = lloyd(x[moving], own, best_path(own, _windows(borders[moving], reach)), LLOYD_STEPS)
        stay = (moved == borders[moving]).all(axis=1)
        borders[moving] = moved
        moving = moving[~stay]
        if not moving.size:
            break
    return borders


def _measure(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Running sums float64[R, K] of nearly the cube root of the error of joining each value to the one before.

    The power is 5/16: square roots are exact on every machine, and fast.
    """
    joined = w[:, 1:] * w[:, :-1]
    joined /= w[:, 1:] + w[:, :-1]
    joined *= np.square(np.diff(x, axis=1))
    quarter = np.sqrt(np.sqrt(joined))
    return prefix(quarter * np.sqrt(np.sqrt(quarter)))


def _candidates(x: np.ndarray, measure: np.ndarray) -> np.ndarray:
    """Ascending candidate borders int64[R, BINS] from 0 to K, half of them even in value, half in ``measure``."""
    rows, cols = x.shape
    fractions = np.arange(1, BINS // 2) / (BINS // 2)
    low, high = x[:, :1], x[:, -1:]
    by_value = search(x, low + fractions * (high - low))
    by_measure = search(measure, fractions * measure[:, -1:])
    ends = np.broadcast_to([0, cols], (rows, 2))
    return np.sort(np.concatenate([ends, by_value, by_measure], axis=1), axis=1)


def _halved(borders: np.ndarray, measure: np.ndarray) -> np.ndarray:
    """Borders int64[R, 2k+1] with every cluster cut where half of its ``measure`` lies on either side."""
    at = row_take(measure, np.minimum(borders, measure.shape[1] - 1))
    halves = np.empty((len(borders), 2 * borders.shape[1] - 1), np.int64)
    halves[:, ::2] = borders
    halves[:, 1::2] = np.clip(search(measure, (at[:, 1:] + at[:, :-1]) / 2), borders[:, :-1], borders[:, 1:])
    return halves


def _windows(borders: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Places int64[R, k-1, m], ascending, that each inner border may take next."""
    clusters = borders.shape[1] - 1
    at = np.clip(np.arange(1, clusters)[:, None] + reach, 0, clusters)
    left = np.minimum(at.astype(np.int64), clusters - 1)
    length = np.diff(borders, axis=1)
    between = borders[:, left] + np.rint(length[:, left] * (at - left)).astype(np.int64)
    near = np.clip(borders[:, 1:-1, None] + STEPS, 0, borders[:, -1:, None])
    return np.sort(np.concatenate([between, near], axis=2), axis=2)

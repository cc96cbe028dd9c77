"""Steps along the lower convex hull of every block's curve of damage over pages.

Only the hull can be part of an optimal relaxed plan. A walk along it gives a block's steps with ever worse rates
(damage a page); taking the steps of all blocks by rate is the LP relaxation of the multiple-choice knapsack.
"""

from typing import NamedTuple

import numpy as np


class Steps(NamedTuple):
    """Hull steps of all blocks in the order to take them."""

    block: np.ndarray  # int64[s]
    to: np.ndarray  # int64[s] level after the step
    pages: np.ndarray  # int64[s] pages released or taken, positive
    rate: np.ndarray  # float64[s] damage added a page, ascending; negative for raises


def moves(
    damage: np.ndarray, pages: np.ndarray, level: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every single move of a block from its ``level`` towards its ``end``, which lie all above or all below.

    Returns pages moved int64[n, B] (positive), damage added float64[n, B] and which moves are legal bool[n, B]:
    within reach, and in the direction that pages should go.
    """
    rows, width = np.arange(len(pages)), pages.shape[1]
    moved = pages - pages[rows, level][:, None]
    added = damage - damage[rows, level][:, None]
    if (end <= level).all():
        legal = between(end, level - 1, width) & (moved < 0)
    else:
        legal = between(level + 1, end, width) & (moved > 0) & (added < 0)
    return np.abs(moved), added, legal


def between(low: np.ndarray, high: np.ndarray, width: int) -> np.ndarray:
    """bool[n, B]: which of ``width`` levels lie within ``low`` to ``high`` int[n]."""
    column = np.arange(width)[:, None]
    return ((column >= low) & (column <= high)).T


def ascending(value: np.ndarray) -> np.ndarray:
    """The stable order int64[s] of ``value`` float64[s]; NumPy's own stable sort takes several times as long."""
    order = np.argsort(value)
    ranked = value[order]
    # Equal values are a group: within it, by index.
    group = np.concatenate([[0], np.cumsum(ranked[1:] != ranked[:-1])])[: len(order)] * len(order)
    return np.sort(order + group) - group


def hull(damage: np.ndarray, pages: np.ndarray, level: np.ndarray, end: np.ndarray) -> Steps:
    """Steps of all blocks from ``level`` to ``end``, by rate; equal rates by block, then the nearer width."""
    n, width = pages.shape
    down = bool((end <= level).all())
    low, high = (end, level) if down else (level, end)
    best, target = _next_on_hull(damage, pages, low, high, down)
    shape, rows, last = (max(width - 1, 1), n), np.arange(n), np.full(n, -np.inf)
    rate, at, to = np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for k in range(int(high.max() - low.min())):
        found = best[level, rows]
        # Rounding must not let a block's later step overtake an earlier one in the sort.
        last = rate[k] = np.maximum(found, last)
        at[k], to[k] = level, target[level, rows]
        level = np.where(np.isfinite(found), to[k], level)
    # By block, then by step: this order stays among equal rates.
    rate = rate.T.ravel()
    found = np.flatnonzero(np.isfinite(rate))
    order = found[ascending(rate[found])]
    block, k = np.divmod(order, shape[0])
    at, to = at[k, block], to[k, block]
    return Steps(block, to, np.abs(pages[block, to] - pages[block, at]), rate[order])


def _next_on_hull(
    damage: np.ndarray, pages: np.ndarray, low: np.ndarray, high: np.ndarray, down: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The best next step from every level within ``low`` to ``high``: rates float64[B, n], infinite where there is
    none, and levels after it int64[B, n]."""
    damage, pages, inside = damage.T, pages.T, between(low, high, pages.shape[1]).T
    best, target = np.full(damage.shape, np.inf), np.zeros(damage.shape, np.int64)
    least, most = int(low.min()), int(high.max())
    within = np.where(inside, damage, np.inf)
    for at in range(least, most + 1):
        # Nearer widths first, so that of several moves on one straight edge the smallest comes first.
        for to in range(at - 1, least - 1, -1) if down else range(at + 1, most + 1):
            size = pages[at] - pages[to] if down else pages[to] - pages[at]
            rate = np.where(size > 0, (within[to] - damage[at]) / np.maximum(size, 1), np.inf)
            np.copyto(target[at], to, where=rate < best[at])
            np.minimum(best[at], rate, out=best[at])
    if not down:
        best[best >= 0] = np.inf  # a raise that removes no damage is not made
    return best, target

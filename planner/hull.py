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
    rows, column = np.arange(len(pages))[:, None], np.arange(pages.shape[1])
    at, end = level[:, None], end[:, None]
    moved = pages - pages[rows, at]
    added = damage - damage[rows, at]
    if (end <= at).all():
        legal = (column < at) & (column >= end) & (moved < 0)
    else:
        legal = (column > at) & (column <= end) & (moved > 0) & (added < 0)
    return np.abs(moved), added, legal


def hull(damage: np.ndarray, pages: np.ndarray, level: np.ndarray, end: np.ndarray) -> Steps:
    """Steps of all blocks from ``level`` to ``end``, by rate; equal rates by block, then the nearer width."""
    n, width = pages.shape
    down = bool((end <= level).all())
    # One contiguous row a width: NumPy is fast along blocks, not along a handful of widths.
    damage, pages = np.ascontiguousarray(damage.T), np.ascontiguousarray(pages.T)
    rate = np.full((width - 1, n), np.inf)
    to = np.zeros((width - 1, n), np.int64)
    size = np.zeros((width - 1, n), np.int64)
    last, rows = np.full(n, -np.inf), np.arange(n)
    nearest = range(width - 1, -1, -1) if down else range(width)
    for k in range(width - 1):
        from_pages, from_damage = pages[level, rows], damage[level, rows]
        best, target, moved = np.full(n, np.inf), level, np.zeros(n, np.int64)
        # Nearer widths first, so that of several moves on one straight edge the smallest comes first.
        for other in nearest:
            reach = (level > other) & (end <= other) if down else (level < other) & (end >= other)
            more = pages[other] - from_pages
            added = damage[other] - from_damage
            legal = reach & (more < 0) if down else reach & (more > 0) & (added < 0)
            if not legal.any():
                continue
            amount = np.abs(more)
            rates = np.where(legal, added / np.maximum(amount, 1), np.inf)
            better = rates < best
            best = np.where(better, rates, best)
            target = np.where(better, other, target)
            moved = np.where(better, amount, moved)
        # Rounding must not let a block's later step overtake an earlier one in the sort.
        last = rate[k] = np.maximum(best, last)
        if not np.isfinite(best).any():
            break
        to[k], size[k], level = target, moved, target
    # By block, then by step, so that a stable sort keeps this order among equal rates.
    rate, to, size = rate.T.ravel(), to.T.ravel(), size.T.ravel()
    found = np.flatnonzero(np.isfinite(rate))
    order = found[np.argsort(rate[found], kind="stable")]
    return Steps(order // max(width - 1, 1), to[order], size[order], rate[order])

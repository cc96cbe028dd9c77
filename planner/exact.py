"""From a good plan to a better one, and to the best one where that is affordable.

With the page price ``rate`` of the LP relaxation, every choice of a level has a reduced cost: what it loses against
the block's best level. No plan that beats the one at hand contains a choice whose reduced cost exceeds the gap to
the LP bound, so most blocks have one level left, and dynamic programming over pages settles the others. Where these
are too many, those closest to the break are settled and the others stay: the result is then no longer certain to be
the best, but never worse than what came in.
"""

import numpy as np

# Instances of fewer blocks are finished, whatever it takes up to a bound on memory. Larger ones are improved only
# where the gap exceeds a share of the damage, and by what takes a millisecond or two.
EXACT_BLOCKS = 256
EXACT_WORK = 200_000_000
TOLERANCE = 1e-3
WORK = 200_000
SETTLED_BLOCKS = 64
ROUNDS = 2


def improve(
    damage: np.ndarray, pages: np.ndarray, allowed: np.ndarray, level: np.ndarray, limit_pages: int, rate: float
) -> np.ndarray:
    """Levels int64[n] of no more damage than ``level``, within ``allowed`` bool[n, B] and ``limit_pages`` in all.

    ``damage`` float64[n, B], ``pages`` int64[n, B]; ``level`` must itself be allowed and within the limit. ``rate``
    is the damage of a page at the break of the relaxation, not negative.
    """
    rows = np.arange(len(level))
    reduced = np.where(allowed, damage + rate * pages, np.inf)
    best = reduced.min(axis=1)
    bound = float(best.sum()) - rate * limit_pages
    reduced -= best[:, None]
    small = len(level) < EXACT_BLOCKS
    # A better plan leaves fewer choices open, so that the next round sees more of them.
    rounds = [(WORK, SETTLED_BLOCKS)] * ROUNDS
    for work, most in [*rounds[:1], (EXACT_WORK, EXACT_BLOCKS)] if small else rounds:
        have = float(damage[rows, level].sum())
        gap = have - bound
        if gap <= (1e-9 if small else TOLERANCE) * abs(have):
            break
        candidate = reduced <= gap * (1 + 1e-9)
        free = np.flatnonzero(candidate.sum(axis=1) > 1)
        if not len(free):
            break
        # Blocks whose second choice costs least decide.
        second = np.where(candidate[free], reduced[free], np.inf)
        free = free[np.argsort(np.partition(second, 1, axis=1)[:, 1], kind="stable")]
        least = np.where(candidate[free], pages[free], np.iinfo(np.int64).max).min(axis=1)
        span = np.cumsum(np.where(candidate[free], pages[free], 0).max(axis=1) - least)
        left = limit_pages - int(pages[rows, level].sum()) + np.cumsum(pages[free, level[free]] - least)
        room = np.minimum(left, span)
        entries = np.cumsum(candidate[free].sum(axis=1)) * (room + 1)
        count = min(int(np.searchsorted(entries, work, side="right")), most)
        if count < 1:
            break
        chosen = free[:count]
        found = level.copy()
        found[chosen] = _settle(damage[chosen], pages[chosen], candidate[chosen], int(room[count - 1]))
        # Only what is really better: of equal plans the simpler one stays.
        if float(damage[rows, found].sum()) < have - 1e-12 * abs(have):
            level = found
        if count == len(free):
            break
    return level


def _settle(damage: np.ndarray, pages: np.ndarray, candidate: np.ndarray, room: int) -> np.ndarray:
    """The best levels of a few blocks that may take ``room`` pages beyond the fewest that they can have."""
    base = np.where(candidate, pages, np.iinfo(np.int64).max).min(axis=1)
    best = np.zeros(room + 1)  # least damage of the blocks so far, by pages they may take
    choice = np.zeros((len(base), room + 1), np.int8)
    for i in range(len(base)):
        total = np.full(room + 1, np.inf)
        for j in np.flatnonzero(candidate[i]):
            extra = int(pages[i, j] - base[i])
            if extra > room:
                continue
            value = best[: room + 1 - extra] + damage[i, j]
            better = value < total[extra:]
            np.copyto(total[extra:], value, where=better)
            np.copyto(choice[i, extra:], j, where=better)
        best = total
    levels = np.zeros(len(base), np.int64)
    for i in range(len(base) - 1, -1, -1):
        levels[i] = choice[i, room]
        room -= int(pages[i, levels[i]] - base[i])
    return levels

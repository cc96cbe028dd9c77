"""Pressure: from the state of the arena to pages that must be released or may be spent.

Headroom is what will be free once everything under way has landed and the running sequences have grown over
the look-ahead::

    headroom = free + releasing - reserving - growth - blocked

    0 ...... demote_below ...... settle_at ...... promote_above ...... capacity
    release up to settle_at  |      dead zone, do nothing      |  spend down to settle_at

Both moves end at ``settle_at``, inside the dead zone, so neither can set off the other.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Thresholds:
    """Marks of headroom as fractions of the arena's pages; ValueError unless they ascend within 0..1.

    They are low because headroom looks ahead already: what is kept free besides costs bits at the peak of the cache.
    """

    demote_below: float = 0.0
    settle_at: float = 0.01
    promote_above: float = 0.03

    def __post_init__(self):
        if not 0 <= self.demote_below <= self.settle_at < self.promote_above <= 1:
            raise ValueError(
                "thresholds must satisfy 0 <= demote_below <= settle_at < promote_above <= 1, got "
                f"{self.demote_below}, {self.settle_at}, {self.promote_above}"
            )


@dataclass(frozen=True)
class Pressure:
    """What the arena asks for; at most one of ``release_pages`` and ``spare_pages`` is not 0."""

    headroom_pages: int
    release_pages: int
    spare_pages: int

    def __str__(self) -> str:
        if self.release_pages:
            return f"Headroom is {self.headroom_pages} pages: release {self.release_pages}."
        if self.spare_pages:
            return f"Headroom is {self.headroom_pages} pages: {self.spare_pages} may be spent."
        return f"Headroom is {self.headroom_pages} pages: nothing to do."


def measure(
    capacity_pages: int,
    free_pages: int,
    growth_pages: int = 0,
    blocked_pages: int = 0,
    releasing_pages: int = 0,
    reserving_pages: int = 0,
    thresholds: Thresholds = Thresholds(),
) -> Pressure:
    """Pressure of an arena of ``capacity_pages``; the terms are those of ``planner.Observation``."""
    headroom = free_pages + releasing_pages - reserving_pages - growth_pages - blocked_pages
    low, settle, high = (
        ceil(fraction * capacity_pages)
        for fraction in (thresholds.demote_below, thresholds.settle_at, thresholds.promote_above)
    )
    # Headroom below 0 is a shortage at any threshold.
    if headroom < max(low, 0):
        return Pressure(headroom, settle - headroom, 0)
    return Pressure(headroom, 0, headroom - settle if headroom > high else 0)

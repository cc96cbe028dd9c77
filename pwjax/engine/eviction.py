"""What cached prefixes are worth: one price a page, for dropping them and for taking precision alike.

A page of cached KV costs, once it is gone, the time to compute it again, if anybody asks for it::

    chunk tokens x measured prefill ms a token x share of prompt chunks that were found so far
    ------------------------------------------------------------------------------------------ x damage_per_ms
                                        pages of a chunk

A page of weights costs the damage a served token that the cheapest next demotion adds, divided by the pages it frees.
Whichever costs less goes first. While cached pages cost less, policies see them as free: nothing is demoted for them,
and they do not keep precision from rising. A cache that nobody hits costs nothing, so it never holds precision down.
"""

import math

import numpy as np

from planner import BlockTable, next_demotion, price
from pwjax.engine.parts import Parts
from pwjax.engine.routing import RoutingRecord
from pwjax.memory import Prefixes

# Share of the damage between the lowest and the highest bits that a second of computing prompts again is worth; found
# by experiments/planner_search/engine_search.py.
RANGE_PER_SECOND = 0.0003
# Boundaries for which the price of a demotion is taken to hold while no bits change.
PERIOD = 16


def default_damage_per_ms(table: BlockTable) -> float:
    """``damage_per_ms`` of a model, in damage a served token: the unit of its table, so a share of its range.

    So small a share because the cheapest demotions cost next to nothing, and they are what a cached prompt competes
    with: by a search on traces with shared beginnings, neither then always goes first.
    """
    return RANGE_PER_SECOND / 1000 * (table.total_damage(table.widths[0]) - table.total_damage(table.widths[-1]))


class Market:
    """Compares the two prices for an engine."""

    def __init__(self, parts: Parts, prefixes: Prefixes):
        self._parts, self._prefixes = parts, prefixes
        self._known: tuple[int, int, int] | None = None
        self._rate = math.inf

    @property
    def prefix(self) -> float:
        """Expected damage a page of evicting cached chunks."""
        prefixes, prefill = self._prefixes, self._parts.meter.prefill
        token_ms = 1000 * prefill.seconds / max(1, prefill.tokens)
        return token_ms * prefixes.chunk_tokens * prefixes.reuse * self._parts.damage_per_ms / prefixes.chunk_pages

    def demotion(self, boundary: int, routing: RoutingRecord, still: np.ndarray, floor_bits: int) -> float:
        """Damage a page of the cheapest demotion, infinite where there is none.

        ``still`` bool[n]: blocks that cannot move; ``floor_bits`` no block may go below. Looked up once a ``PERIOD``,
        and whenever bits or the floor have changed.
        """
        known = boundary // PERIOD, self._parts.page_table.epoch, floor_bits
        if known != self._known:
            table, self._known = self._parts.table, known
            prices = price(table, routing.choices if routing.tokens else None, routing.tokens)
            self._rate = next_demotion(table, self._parts.pager.committed, prices, still, floor_bits)
        return self._rate

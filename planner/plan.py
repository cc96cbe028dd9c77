"""A plan: which bits every block should have, why, and what that costs.

A plan is data. It holds no device state and moves nothing; the pager reads :meth:`Plan.changes`.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from planner.damage import Prices
from planner.explain import explain_block
from planner.tables import BlockTable


class PlanStatus(Enum):
    """How a plan ended; the value is a sentence for people."""

    MET = "The plan meets its target."
    UNMET = "No legal plan releases enough pages; this is the largest safe reduction."
    TOO_SMALL = "The blocks do not fit even at the fewest bits they may have; more pages are needed."


@dataclass(frozen=True)
class Change:
    """One block's move. ``pages`` and ``damage`` are differences: negative pages are released."""

    block: int
    layer: int
    expert: int
    matrix: int
    from_bits: int
    to_bits: int
    pages: int
    damage: float


@dataclass(frozen=True, eq=False)
class Plan:
    """Desired bits of all blocks.

    ``before`` and ``bits`` int64[n]: bits planned from, and wanted. ``stage``: how far floors were relaxed, 0 is
    the safest. ``cause``: why the plan was made. ``bound``: what no plan for this target, stage and set of movable
    blocks can beat (LP relaxation), so ``damage - bound`` limits what the solver lost; None: not solved for.
    ``prices``: what damage was when the plan was made; None: as calibrated. ``floor`` int64[n]: the bits below which
    blocks were not taken; None: no block had a floor.
    """

    table: BlockTable
    before: np.ndarray
    bits: np.ndarray
    status: PlanStatus = PlanStatus.MET
    stage: int = 0
    cause: str = ""
    bound: float | None = None
    prices: Prices | None = None
    floor: np.ndarray | None = None

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.status is PlanStatus.MET

    @property
    def moves(self) -> bool:
        """Whether any block changes."""
        return not np.array_equal(self.before, self.bits)

    @cached_property
    def pages_before(self) -> int:
        """Pages of all blocks before the plan."""
        return self.table.total_pages(self.before)

    @cached_property
    def pages_after(self) -> int:
        """Pages of all blocks once the plan is committed."""
        return self.table.total_pages(self.bits)

    @property
    def released_pages(self) -> int:
        """Pages that the plan sets free; negative where it takes some."""
        return self.pages_before - self.pages_after

    @cached_property
    def damage(self) -> float:
        """Predicted damage a served token of all blocks once the plan is committed, at the plan's prices."""
        return self.damage_of(self.bits)

    @property
    def damages(self) -> np.ndarray:
        """The plan's prices, float64[n, B]."""
        return self.table.expected if self.prices is None else self.prices.damage

    def damage_of(self, bits: np.ndarray) -> float:
        """Predicted damage of all blocks at ``bits`` int[n], at the plan's prices."""
        return float(self.damages[np.arange(self.table.blocks), self.table.level(bits)].sum())

    @property
    def reasons(self) -> dict[int, str]:
        """A short reason for every block that moves."""
        return {c.block: _reason(c) for c in self.changes()}

    def changes(self, current: np.ndarray | None = None) -> list[Change]:
        """Blocks whose bits differ from ``current`` (int[n]; default: what was planned from), by block index."""
        table, current = self.table, self.before if current is None else np.asarray(current)
        old, new = table.level(current), table.level(self.bits)
        changes = []
        for i in np.flatnonzero(old != new).tolist():
            a, b = old[i], new[i]
            pages = int(table.pages[i, b] - table.pages[i, a])
            damage = float(self.damages[i, b] - self.damages[i, a])
            changes.append(Change(i, *table.locate(i), table.widths[a], table.widths[b], pages, damage))
        return changes

    def explain(self, limit: int = 10, block: int | None = None) -> str:
        """Readable text: the cause, the outcome, and the ``limit`` moves that change damage most.

        With ``block``, why that block has its bits instead of the moves; ValueError for one that is not in the table.
        """
        table = self.table
        if block is not None and not 0 <= block < table.blocks:
            raise ValueError(f"there is no block {block}; blocks are 0 to {table.blocks - 1}")
        start, end = self.damage_of(self.before), self.damage
        gap = "" if self.bound is None else f"; no plan for this target is below {self.bound:.4g}"
        lines = [self.cause] if self.cause else []
        lines += [
            self.status.value + (f" Floors were relaxed to stage {self.stage}." if self.stage else ""),
            f"pages      {self.pages_before} -> {self.pages_after} ({-self.released_pages:+d})",
            f"damage     {start:.4g} -> {end:.4g} ({end - start:+.4g}{gap})",
            f"mean bits  {table.mean_bits(self.before):.2f} -> {table.mean_bits(self.bits):.2f}",
            "blocks     " + ", ".join(f"{c} at {b} bits" for b, c in table.histogram(self.bits).items() if c),
        ]
        if block is not None:
            return "\n".join([*lines, explain_block(self, block)])
        changes = sorted(self.changes(), key=lambda c: (-abs(c.damage), c.block))
        lines += [f"  {table.name(c.block)}: {_reason(c)}" for c in changes[:limit]]
        if len(changes) > limit:
            lines.append(f"  and {len(changes) - limit} more blocks")
        return "\n".join(lines)


def _reason(change: Change) -> str:
    verb, effect = ("releases", "adds") if change.pages < 0 else ("takes", "removes")
    pages = f"{abs(change.pages)} page{'s' * (abs(change.pages) != 1)}"
    return f"{change.from_bits} -> {change.to_bits} bits {verb} {pages} and {effect} {abs(change.damage):.4g} damage"

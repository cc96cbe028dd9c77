"""What calibration hands to the planner: damage and pages of every block at every width.

Shapes are named once here: ``n`` blocks, ``B`` widths, ``n = layers * experts * 2``. Block
``(layer, expert, matrix)`` is row ``(layer * experts + expert) * 2 + matrix``; matrix 0 is ``gate_up``,
1 is ``down``. Widths ascend and 16 comes last where the model has a fallback. A *level* is a column of
the tables: the index of a width. A *transition* ``j`` is the step from level ``j + 1`` down to level ``j``.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.kinds import RARE, TextKinds
from planner.residual import ResidualHeads

MATRICES = ("gate_up", "down")


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Damage and pages of all blocks; checked and read-only once made.

    ``damage`` float64[n, B]: predicted quality loss, not negative, never growing with bits, 0 at 16. With
    ``conditional`` it is a mean over the tokens routed to the expert and counts as often as tokens are; without, the
    routing of calibration is inside. ``pages`` int64[n, B]: pages a block holds, planes and LUT. A width that takes
    as many pages as a wider one is legal (a LUT can outgrow its planes) and is simply never worth choosing.
    ``params`` int64[n]: weights of a block. ``routing_mass`` float64[layers, experts]: router-weight share of
    each expert on calibration text; ``routing_rate`` of the same shape: choices a token (None: the mass).
    ``floors`` int64[n] or None: fewest bits that calibration advises. ``heads``: prompt residual, None where
    calibration has none. ``kinds``: damage in each of calibration's texts, for a ``conditional`` table; None where
    there was one text. Raises ValueError with the first fault found.
    """

    layers: int
    experts: int
    widths: tuple[int, ...]
    damage: np.ndarray
    pages: np.ndarray
    params: np.ndarray
    routing_mass: np.ndarray
    routing_rate: np.ndarray | None = None
    conditional: bool = False
    floors: np.ndarray | None = None
    heads: ResidualHeads | None = None
    kinds: TextKinds | None = None

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(int(b) for b in self.widths))
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            if value is None:
                continue
            # A width after the other in memory: NumPy is fast along blocks, not along a handful of widths.
            array = np.array(value, dtype, order="F")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        self.validate()

    def validate(self) -> None:
        """Raise ValueError, in a sentence that names the place, for the first thing that is wrong."""
        n, widths = self.blocks, self.widths
        if self.layers < 1 or self.experts < 1:
            raise ValueError(f"a table needs layers and experts, got {self.layers} and {self.experts}")
        if not widths or list(widths) != sorted(set(widths)) or not all(b in (*range(2, 9), 16) for b in widths):
            raise ValueError(f"widths must ascend within 2..8, then 16 if it is there; got {widths}")
        for name, shape, least in (
            ("damage", (n, len(widths)), 0),
            ("pages", (n, len(widths)), 1),
            ("params", (n,), 1),
            ("routing_mass", (self.layers, self.experts), 0),
            ("routing_rate", (self.layers, self.experts), 0),
            ("floors", (n,), widths[0]),
        ):
            array = getattr(self, name)
            if array is None:
                continue
            if array.shape != shape:
                raise ValueError(f"{name} must have the shape {shape}, got {array.shape}")
            bad = np.argwhere(~(np.isfinite(array) & (array >= least)))
            if bad.size:
                where = tuple(int(i) for i in bad[0])
                raise ValueError(f"{name}{list(where)} is {array[where]}; it must be finite and at least {least}")
        rises = np.argwhere(np.diff(self.damage, axis=1) > 0)
        if rises.size:
            i, j = (int(x) for x in rises[0])
            raise ValueError(
                f"damage must not grow with bits: {self.name(i)} has {self.damage[i, j]:.4g} at {widths[j]} bits "
                f"and {self.damage[i, j + 1]:.4g} at {widths[j + 1]}; take the running minimum"
            )
        if widths[-1] == 16 and self.damage[:, -1].any():
            raise ValueError("damage must be 0 at 16 bits, which are the original weights")
        if self.floors is not None and not np.isin(self.floors, widths).all():
            wrong = self.floors[~np.isin(self.floors, widths)][0]
            raise ValueError(f"floors must be widths of the table, {', '.join(map(str, widths))}; got {wrong}")
        if self.heads is not None and self.heads.confidence.shape != (2, len(widths) - 1):
            raise ValueError(f"residual heads must have the shape {(2, len(widths) - 1)}, got {self.heads.shape}")
        if self.heads is not None and self.heads.reference is not None and len(self.heads.reference.mean) != n:
            raise ValueError(f"the residual's moments must be of {n} blocks, got {len(self.heads.reference.mean)}")
        if self.kinds is not None:
            self._validate_kinds(self.kinds)

    def _validate_kinds(self, kinds: TextKinds) -> None:
        if not self.conditional:
            raise ValueError("kinds of text need damage of a routed token, and this table's is of a served one")
        if kinds.damage.shape[1:] != self.damage.shape or kinds.usage.shape[1:] != self.routing_mass.shape:
            raise ValueError(
                f"kinds of text must be of {self.damage.shape} damages and {self.routing_mass.shape} experts, got "
                f"{kinds.damage.shape[1:]} and {kinds.usage.shape[1:]}"
            )
        if self.widths[-1] == 16 and kinds.damage[..., -1].any():
            raise ValueError("damage must be 0 at 16 bits, which are the original weights, in every kind of text")

    @property
    def blocks(self) -> int:
        """Number of blocks, ``n``."""
        return self.layers * self.experts * 2

    @property
    def choices(self) -> float:
        """Experts that a token chooses in a layer; 1 where calibration did not count them."""
        return 1.0 if self.routing_rate is None else max(float(self.routing_rate[0].sum()), 1.0)

    @cached_property
    def expected(self) -> np.ndarray:
        """Damage a served token, float64[n, B], under the routing of calibration."""
        if not self.conditional:
            return self.damage
        expected = self.rate[:, None] * self.damage
        expected.setflags(write=False)
        return expected

    @cached_property
    def rate(self) -> np.ndarray:
        """Choices a served token of each block's expert, float64[n], under the routing of calibration."""
        # What was never chosen is rare, not free.
        return np.repeat(np.maximum(self.usage, RARE * self.usage.mean(axis=1, keepdims=True)).ravel(), 2)

    @property
    def usage(self) -> np.ndarray:
        """How often calibration used each expert, float64[layers, experts]: choices, or the mass where it has none."""
        return self.routing_mass if self.routing_rate is None else self.routing_rate

    def routing_shift(self, usage: np.ndarray) -> np.ndarray:
        """How much more each block is used than calibration saw, float64[n]: 1 where nothing changed.

        ``usage`` float[layers, experts] is on any scale a layer. What is used less than RARE of an expert's fair share
        counts as that; where damage has calibration's routing inside, both shares get it added, so that the ratio of
        two rare experts stays small. A layer without routing yet counts as unchanged. ValueError for usage of another
        shape, or not usage.
        """
        usage = np.asarray(usage, float)
        if usage.shape != self.routing_mass.shape or not np.isfinite(usage).all() or (usage < 0).any():
            raise ValueError(
                f"routing must be finite, not negative and of shape {self.routing_mass.shape}, got {usage.shape}"
            )
        before, rare = shares(self.usage), RARE / self.experts
        now = np.where(usage.sum(axis=1, keepdims=True) > 0, shares(usage), before)
        floored = np.maximum if self.conditional else np.add
        return np.repeat((floored(now, rare) / floored(before, rare)).ravel(), 2)

    def locate(self, block: int) -> tuple[int, int, int]:
        """``(layer, expert, matrix)`` of a block."""
        return block // 2 // self.experts, block // 2 % self.experts, block % 2

    def name(self, block: int) -> str:
        """Readable name of a block."""
        layer, expert, matrix = self.locate(block)
        return f"layer {layer} expert {expert} {MATRICES[matrix]}"

    def level(self, bits: np.ndarray | int) -> np.ndarray:
        """Levels int64[n] of ``bits`` (int[n], or one width for all); ValueError for a width not in the table."""
        bits = np.broadcast_to(np.asarray(bits), (self.blocks,))
        level = self._levels[np.clip(bits, 0, len(self._levels) - 1)]
        wrong = np.flatnonzero(level < 0)
        if wrong.size:
            raise ValueError(f"{bits[wrong[0]]} bits are not in this table; it has {', '.join(map(str, self.widths))}")
        return level

    @cached_property
    def _levels(self) -> np.ndarray:
        """Level of every number of bits, -1 where it is not in the table, as are the first and the last."""
        levels = np.full(self.widths[-1] + 2, -1)
        levels[list(self.widths)] = range(len(self.widths))
        return levels

    def bits(self, level: np.ndarray) -> np.ndarray:
        """Bits int64[n] of levels: the inverse of :meth:`level`."""
        return np.asarray(self.widths, np.int64)[level]

    def total_pages(self, bits: np.ndarray | int) -> int:
        """Pages that all blocks hold at ``bits`` (int[n], or one width for all)."""
        return int(self.pages[np.arange(self.blocks), self.level(bits)].sum())

    def total_damage(self, bits: np.ndarray | int) -> float:
        """Predicted damage a served token of running all blocks at ``bits``, under the routing of calibration."""
        return float(self.expected[np.arange(self.blocks), self.level(bits)].sum())

    def mean_bits(self, bits: np.ndarray | int) -> float:
        """Mean bits a weight, weighted by parameters."""
        return float((self.bits(self.level(bits)) * self.params).sum() / self.params.sum())

    def histogram(self, bits: np.ndarray | int) -> dict[int, int]:
        """Blocks at each width of the table, ascending, zeros included."""
        counts = np.bincount(self.level(bits), minlength=len(self.widths))
        return {b: int(c) for b, c in zip(self.widths, counts, strict=True)}


def shares(mass: np.ndarray) -> np.ndarray:
    """``mass`` float[layers, experts] so that each layer sums to 1; a layer without any is spread evenly."""
    total = mass.sum(axis=1, keepdims=True)
    return np.where(total > 0, mass / np.where(total > 0, total, 1), 1 / mass.shape[1])


_DTYPES = {
    "damage": float, "pages": np.int64, "params": np.int64, "routing_mass": float, "routing_rate": float,
    "floors": np.int64,
}  # fmt: skip

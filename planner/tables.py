"""What calibration hands to the planner: damage and pages of every block at every width.

Shapes are named once here: ``n`` blocks, ``B`` widths, ``n = layers * experts * 2``. Block
``(layer, expert, matrix)`` is row ``(layer * experts + expert) * 2 + matrix``; matrix 0 is ``gate_up``,
1 is ``down``. Widths ascend and 16 comes last where the model has a fallback. A *level* is a column of
the tables: the index of a width.
"""

from dataclasses import dataclass

import numpy as np

MATRICES = ("gate_up", "down")


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Damage and pages of all blocks; checked and read-only once made.

    ``damage`` float64[n, B]: predicted quality loss, not negative, never growing with bits, 0 at 16.
    ``pages`` int64[n, B]: pages a block holds, planes and LUT. A width that takes as many pages as a wider
    one is legal (a LUT can outgrow its planes) and is simply never worth choosing.
    ``params`` int64[n]: weights of a block. ``routing_mass`` float64[layers, experts]: router-weight share of
    each expert on calibration text. Raises ValueError with the first fault found.
    """

    layers: int
    experts: int
    widths: tuple[int, ...]
    damage: np.ndarray
    pages: np.ndarray
    params: np.ndarray
    routing_mass: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(int(b) for b in self.widths))
        for name, dtype in (("damage", float), ("pages", np.int64), ("params", np.int64), ("routing_mass", float)):
            array = np.array(getattr(self, name), dtype)
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
        ):
            array = getattr(self, name)
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

    @property
    def blocks(self) -> int:
        """Number of blocks, ``n``."""
        return self.layers * self.experts * 2

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
        level = np.minimum(np.searchsorted(self.widths, bits), len(self.widths) - 1)
        wrong = np.flatnonzero(np.asarray(self.widths)[level] != bits)
        if wrong.size:
            raise ValueError(f"{bits[wrong[0]]} bits are not in this table; it has {', '.join(map(str, self.widths))}")
        return level

    def bits(self, level: np.ndarray) -> np.ndarray:
        """Bits int64[n] of levels: the inverse of :meth:`level`."""
        return np.asarray(self.widths, np.int64)[level]

    def total_pages(self, bits: np.ndarray | int) -> int:
        """Pages that all blocks hold at ``bits`` (int[n], or one width for all)."""
        return int(self.pages[np.arange(self.blocks), self.level(bits)].sum())

    def total_damage(self, bits: np.ndarray | int) -> float:
        """Predicted damage of running all blocks at ``bits``."""
        return float(self.damage[np.arange(self.blocks), self.level(bits)].sum())

    def mean_bits(self, bits: np.ndarray | int) -> float:
        """Mean bits a weight, weighted by parameters."""
        return float((self.bits(self.level(bits)) * self.params).sum() / self.params.sum())

    def histogram(self, bits: np.ndarray | int) -> dict[int, int]:
        """Blocks at each width of the table, ascending, zeros included."""
        counts = np.bincount(self.level(bits), minlength=len(self.widths))
        return {b: int(c) for b, c in zip(self.widths, counts, strict=True)}

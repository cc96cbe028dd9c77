"""Page geometry: how rows of planes, LUTs, 16-bit weights and KV tokens sit in pages.

Everything that lives in a page is a run of equal rows, and a page holds whole rows only::

    page    | row 0 | row 1 | ... | row rows_per_page-1 | unused tail |
    plane   one row = one weight row of one bit plane          ceil(K/32) words
    LUT     one row = one LUT group: G float16 scales, 2^b float16 centroids
    16 bit  one row = one bfloat16 weight row                   ceil(K/2) words
    KV      one row = K (or V) of one token of one layer

A block's host pages are laid out as ``planes 0..p-1 | LUT of each width | 16-bit rows``; its table
slots as ``planes 0..p-1 | LUT of the committed width``, or the 16-bit pages from slot 0.
Pure functions of shapes; no arrays, no devices.
"""

from dataclasses import dataclass
from functools import cached_property

MATRICES = ("gate_up", "down")
WORD_BYTES = 4

# What a page costs beyond its bytes (table entries, checksum, one copy to launch), in words: keeps the
# choice away from tiny pages that waste nothing and move slowly.
PAGE_OVERHEAD_WORDS = 64


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


@dataclass(frozen=True)
class RowLayout:
    """``rows`` rows of ``row_words`` uint32 words in pages of ``page_words``, whole rows only."""

    rows: int
    row_words: int
    page_words: int

    @property
    def rows_per_page(self) -> int:
        """Whole rows that one page holds."""
        return self.page_words // self.row_words

    @property
    def pages(self) -> int:
        """Pages that all rows need."""
        return ceil_div(self.rows, self.rows_per_page)


@dataclass(frozen=True)
class BlockShape:
    """One expert matrix: ``rows`` outputs, ``cols`` inputs, ``lut_rows`` rows that share a LUT."""

    rows: int
    cols: int
    lut_rows: int = 1

    def __post_init__(self):
        if min(self.rows, self.cols, self.lut_rows) < 1:
            raise ValueError(f"block sizes must be positive, got {self}")
        if self.rows % self.lut_rows:
            raise ValueError(f"lut_rows must divide the rows: {self.lut_rows} does not divide {self.rows}")

    @property
    def params(self) -> int:
        """Weights of the block."""
        return self.rows * self.cols

    @property
    def plane_row_words(self) -> int:
        """Words of one row of one plane; columns are padded to a multiple of 32."""
        return ceil_div(self.cols, 32)

    @property
    def groups(self) -> int:
        """LUT groups of the block."""
        return self.rows // self.lut_rows

    @property
    def scale_words(self) -> int:
        """Words of the float16 row scales that head a LUT group."""
        return ceil_div(self.lut_rows, 2)

    def lut_row_words(self, bits: int) -> int:
        """Words of one LUT group at ``bits``: scales, then ``2**bits`` centroids."""
        return self.scale_words + (1 << bits) // 2

    @property
    def dense_row_words(self) -> int:
        """Words of one bfloat16 weight row."""
        return ceil_div(self.cols, 2)


@dataclass(frozen=True)
class Geometry:
    """Where every page of a model's blocks lies, on the host and in the table slots.

    ``widths`` are the quantized widths, contiguous and ascending within 2..8; ``fallback`` says whether
    16-bit pages exist. Raises ValueError for anything a page cannot hold.
    """

    page_words: int
    widths: tuple[int, ...]
    fallback: bool
    gate_up: BlockShape
    down: BlockShape

    def __post_init__(self):
        lo, hi = self.widths[0], self.widths[-1]
        if self.widths != tuple(range(lo, hi + 1)) or lo < 2 or hi > 8:
            raise ValueError(f"widths must be a contiguous range within 2..8, got {self.widths}")
        for shape in (self.gate_up, self.down):
            widest = max(shape.plane_row_words, shape.lut_row_words(hi), shape.dense_row_words * self.fallback)
            if widest > self.page_words:
                raise ValueError(f"a page of {self.page_words} words cannot hold a row of {widest} words")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_words * WORD_BYTES

    @property
    def parent(self) -> int:
        """The widest quantized width: the number of planes."""
        return self.widths[-1]

    @property
    def all_bits(self) -> tuple[int, ...]:
        """Every precision a block can have, ascending: the widths, then 16 where there is a fallback."""
        return self.widths + ((16,) if self.fallback else ())

    def shape(self, matrix: int) -> BlockShape:
        """Shape of matrix 0 (``gate_up``) or 1 (``down``)."""
        return (self.gate_up, self.down)[matrix]

    def plane_layout(self, matrix: int) -> RowLayout:
        """Rows of one plane."""
        shape = self.shape(matrix)
        return RowLayout(shape.rows, shape.plane_row_words, self.page_words)

    def lut_layout(self, matrix: int, bits: int) -> RowLayout:
        """Groups of the LUT of one width."""
        shape = self.shape(matrix)
        return RowLayout(shape.groups, shape.lut_row_words(bits), self.page_words)

    def dense_layout(self, matrix: int) -> RowLayout:
        """bfloat16 rows of the 16-bit fallback."""
        shape = self.shape(matrix)
        return RowLayout(shape.rows, shape.dense_row_words, self.page_words)

    def lut_slot(self, matrix: int) -> int:
        """Table slot of the first LUT page; the planes lie before it."""
        return self.parent * self.plane_layout(matrix).pages

    @cached_property
    def slots(self) -> int:
        """Table slots a block needs at its largest precision, over both matrices."""
        return max(max(self.table_slots(m, b)) + 1 for m in (0, 1) for b in self.all_bits)

    def table_slots(self, matrix: int, bits: int) -> tuple[int, ...]:
        """Slots that hold the pages of a block at ``bits``, in the order of :meth:`host_pages`."""
        self._check(bits)
        if bits == 16:
            return tuple(range(self.dense_layout(matrix).pages))
        planes = range(bits * self.plane_layout(matrix).pages)
        start = self.lut_slot(matrix)
        return (*planes, *range(start, start + self.lut_layout(matrix, bits).pages))

    def block_pages(self, matrix: int, bits: int) -> int:
        """``M(i, b)`` in pages: planes ``0..b-1`` and the LUT of ``b``, or the 16-bit rows."""
        return len(self.table_slots(matrix, bits))

    def host_pages(self, matrix: int, bits: int) -> tuple[int, ...]:
        """Pages of a block at ``bits``, counted from the block's first page on the host."""
        self._check(bits)
        start = self.parent * self.plane_layout(matrix).pages
        if bits == 16:
            start += sum(self.lut_layout(matrix, b).pages for b in self.widths)
            return tuple(range(start, start + self.dense_layout(matrix).pages))
        start += sum(self.lut_layout(matrix, b).pages for b in self.widths if b < bits)
        planes = range(bits * self.plane_layout(matrix).pages)
        return (*planes, *range(start, start + self.lut_layout(matrix, bits).pages))

    def host_block_pages(self, matrix: int) -> int:
        """Pages that a block has on the host: everything it can ever need."""
        return self.host_pages(matrix, self.all_bits[-1])[-1] + 1

    def host_block_start(self, expert: int, matrix: int) -> int:
        """First page of a block in its layer's page file."""
        per_expert = self.host_block_pages(0) + self.host_block_pages(1)
        return expert * per_expert + (self.host_block_pages(0) if matrix else 0)

    def host_layer_pages(self, experts: int) -> int:
        """Pages of one layer's page file."""
        return self.host_block_start(experts, 0)

    def to_json(self) -> dict:
        """Plain dictionary for the manifest."""
        shape = lambda s: {"rows": s.rows, "cols": s.cols, "lut_rows": s.lut_rows}  # noqa: E731
        return {
            "page_words": self.page_words,
            "widths": list(self.widths),
            "fallback": self.fallback,
            "gate_up": shape(self.gate_up),
            "down": shape(self.down),
        }

    @classmethod
    def from_json(cls, data: dict) -> "Geometry":
        """Inverse of :meth:`to_json`; KeyError or ValueError where the dictionary is not one."""
        return cls(
            page_words=int(data["page_words"]),
            widths=tuple(int(b) for b in data["widths"]),
            fallback=bool(data["fallback"]),
            gate_up=BlockShape(**data["gate_up"]),
            down=BlockShape(**data["down"]),
        )

    def _check(self, bits: int) -> None:
        if bits not in self.all_bits:
            raise ValueError(f"{bits} bits are not in this model; it has {', '.join(map(str, self.all_bits))}")


def choose_page_words(
    gate_up: BlockShape, down: BlockShape, widths: tuple[int, ...], fallback: bool, kv_row_words: int
) -> int:
    """Page size that wastes least over all page kinds, with a fixed cost a page counted.

    Candidates are multiples of 64 words from 2 KiB to 256 KiB that hold at least one row of every kind;
    waste is judged on the mean over widths of both blocks, times the tail that KV rows leave unused.
    Ties go to the larger page. Raises ValueError where no candidate holds every row.
    """
    best = None
    for words in range(512, 65536 + 1, 64):
        if words < kv_row_words:
            continue
        try:
            geometry = Geometry(words, widths, fallback, gate_up, down)
        except ValueError:
            continue
        used = sum(geometry.block_pages(m, b) for m in (0, 1) for b in widths) * (words + PAGE_OVERHEAD_WORDS)
        # KV is the other tenant of the arena: a page that wastes its tail on KV rows loses as much
        # as one that wastes it on planes.
        cost = used * words / (words // kv_row_words * kv_row_words)
        if best is None or cost <= best[0]:
            best = (cost, words)
    if best is None:
        raise ValueError("no page of at most 256 KiB holds a row of every kind of this model")
    return best[1]

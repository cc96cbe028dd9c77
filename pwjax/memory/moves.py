"""One block's change of precision as data: what to stage, where it goes, what becomes free.

A *demotion* overwrites pages that the block owns already and will not keep (dropped planes, the old LUT, 16-bit
rows), so it needs no free page. A *promotion* writes reserved pages only, so the old epoch stays whole until the new
one is in force; the first load is a promotion from 0 bits. Planes that both precisions share are never touched.

A move larger than the staging budget comes in parts. Parts before the last are written while the old epoch is still
read, so they go to reserved pages, in both directions; only the last part, written together with the new epoch, may
overwrite live pages. A demotion therefore needs ``pages staged - last part`` free pages, which is 0 whenever it fits
in one part.
"""

from dataclasses import dataclass

import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.memory.transfer import TransferHandle


@dataclass(frozen=True)
class MoveShape:
    """Page counts of a move, known without any page id.

    ``kept`` leading slots both precisions share; ``writes`` host pages to stage, counted from the block's first;
    ``reserve`` free pages it takes before it starts; ``frees`` pages it returns when it commits.
    """

    kept: int
    writes: tuple[int, ...]
    reserve: int
    frees: int


def move_shape(geometry: Geometry, matrix: int, from_bits: int, to_bits: int, part_pages: int) -> MoveShape:
    """Shape of a move between two precisions (0: not loaded) when a part stages at most ``part_pages`` pages."""
    shared = min(from_bits, to_bits) if 16 not in (from_bits, to_bits) else 0
    kept = shared * geometry.plane_layout(matrix).pages
    pool = (geometry.block_pages(matrix, from_bits) if from_bits else 0) - kept
    writes = geometry.host_pages(matrix, to_bits)[kept:]
    if to_bits > from_bits:
        reserve = len(writes)
    else:
        last_part = (len(writes) - 1) % part_pages + 1
        reserve = max(len(writes) - last_part, len(writes) - pool)
    return MoveShape(kept, writes, reserve, pool - (len(writes) - reserve))


@dataclass
class Move:
    """A move in flight.

    ``targets`` arena page of each write, ``new_ids`` the block's pages in slot order afterwards, ``reserved`` those it
    took, ``frees`` those it returns (all int32); ``written`` pages of earlier parts are in the arena already.
    ``staged_pages`` padded pages of the part in flight count against staging; ``handle`` None waits for its turn.
    """

    block: int
    from_bits: int
    to_bits: int
    writes: tuple[int, ...]
    targets: np.ndarray
    new_ids: np.ndarray
    reserved: np.ndarray
    frees: np.ndarray
    part_pages: int
    written: int = 0
    staged_pages: int = 0
    handle: TransferHandle | None = None
    started_s: float = 0.0

    @property
    def part(self) -> slice:
        """The writes of the part in flight, or of the next one."""
        return slice(self.written, min(self.written + self.part_pages, len(self.writes)))

    @property
    def promotes(self) -> bool:
        """Whether the bits rise."""
        return self.to_bits > self.from_bits


def make_move(
    block: int,
    from_bits: int,
    to_bits: int,
    shape: MoveShape,
    old_ids: np.ndarray,
    reserved: np.ndarray,
    part_pages: int,
) -> Move:
    """Assign arena pages to a move: ``old_ids`` the block's pages in slot order, ``reserved`` ``shape.reserve`` ids."""
    kept, pool = old_ids[: shape.kept], old_ids[shape.kept :]
    own = len(shape.writes) - shape.reserve
    targets = np.concatenate([reserved, pool[:own]])
    new_ids = np.concatenate([kept, targets])
    return Move(block, from_bits, to_bits, shape.writes, targets, new_ids, reserved, pool[own:], part_pages)

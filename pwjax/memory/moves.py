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
from enum import Enum

import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.memory.allocator import PageError
from pwjax.memory.transfer import StagedPages, TransferHandle


class MoveState(Enum):
    """Where the pages of a move are; see :data:`TRANSITIONS`."""

    HOST = "on the host; arena pages are reserved, no copy runs"
    IN_FLIGHT = "a copy runs, its words count as staged"
    STAGED = "the words are on the device, in no table"
    RESIDENT = "the new epoch names the new pages, the old ones still belong to the block"
    RETIRED = "the old pages are free"
    DROPPED = "forgotten: failed, late or not wanted any more; the reservation is free"


# What may follow what. A move in parts goes around HOST, IN_FLIGHT, STAGED once a part.
TRANSITIONS = {
    MoveState.HOST: (MoveState.IN_FLIGHT, MoveState.DROPPED),
    MoveState.IN_FLIGHT: (MoveState.STAGED, MoveState.DROPPED),
    MoveState.STAGED: (MoveState.HOST, MoveState.RESIDENT, MoveState.DROPPED),
    MoveState.RESIDENT: (MoveState.RETIRED,),
    MoveState.RETIRED: (),
    MoveState.DROPPED: (),
}


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
    """A move under way.

    ``state`` changes by :meth:`enter` alone. ``targets`` arena page of each write, ``new_ids`` the block's pages in
    slot order afterwards, ``reserved`` those it took, ``frees`` those it returns (all int32); ``written`` pages of
    earlier parts are in the arena already.
    ``staged_pages`` padded pages of the part under way count against staging; ``handle`` its copy while in flight,
    ``staged`` its words afterwards.
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
    staged: StagedPages | None = None
    started_s: float = 0.0
    state: MoveState = MoveState.HOST

    def enter(self, state: MoveState) -> None:
        """Go on to ``state``; :class:`PageError` where :data:`TRANSITIONS` does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise PageError(f"block {self.block}: a move cannot go from {self.state.name} to {state.name}")
        self.state = state

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


def largest_demotion_pages(geometry: Geometry) -> int:
    """Pages that the largest demotion stages. Staging that holds them keeps every demotion in one part, so that it
    needs no free page."""
    below = {high: [b for b in geometry.all_bits if b < high] for high in geometry.all_bits}
    shapes = [
        move_shape(geometry, matrix, high, low, 1 << 30)
        for matrix in (0, 1)
        for high, lows in below.items()
        for low in lows
    ]
    return max((len(shape.writes) for shape in shapes), default=0)

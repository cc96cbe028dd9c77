"""The pager: moves blocks between precisions while compiled steps run, one epoch per boundary with changes.

::

    HOST --stage--> IN_FLIGHT --ready--> STAGED --commit@boundary--> RESIDENT --retire@boundary--> HOST

    request(bits)   what the planner wants; its difference to the committed bits is the queue
    boundary(i)     1 collect copies that have ended    2 commit: write pages, then one new epoch
                    3 retire: free what no table names  4 start copies, demotions first, within the staging budget

A plan is whole or not at all per block: committed bits only ever point at resident pages. A copy that fails, is late
or comes back short leaves the old epoch in force and returns its reservation; it is tried again after a growing
number of boundaries, and after ``tries`` failures in a row the block keeps its committed bits for the rest of the run.
Pages in use (blocks, reservations, KV) are bounded by the arena, staged words by ``staging_pages``: nothing starts
before its place is reserved, and the words of a commit are gone before the next copies start.

Movement never holds a step up: copies run in threads, nothing is waited for, and :class:`~pwjax.memory.pacing.Pace`
bounds the time that boundaries take and, where steps run on the CPU, that copies take from them. What has landed and
is not taken waits, staged, for a later boundary; demotions go first, and do not wait where KV needs their pages now.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product

import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.memory.allocator import PageAllocator, PageError
from pwjax.memory.arena import Arena, padded_pages
from pwjax.memory.moves import Move, MoveShape, MoveState, make_move, move_shape
from pwjax.memory.pacing import Pace
from pwjax.memory.page_table import PageTableState, block_owner
from pwjax.memory.report import BoundaryReport, Commit, Counters, Outcome
from pwjax.memory.retries import Retries
from pwjax.memory.transfer import StagedPages, Transfer, TransferError, TransferHandle, TransferJob


def move_owner(block: int) -> tuple[str, int]:
    """Name under which the pages reserved for a block's move are owned."""
    return ("move", int(block))


class Pager:
    """Owner of the blocks' pages and the only writer of the page table. Only the engine thread calls it.

    ``staging_pages`` bounds the padded pages of staged words alive on the device at any time; ``late_s`` seconds of
    ``clock`` make a copy late; ``tries`` failures in a row freeze a block; ``pace`` bounds the time of boundaries
    (None: as much as promised, measured by ``clock``). ValueError where the staging budget does not hold the smallest
    commit.
    """

    def __init__(
        self,
        arena: Arena,
        allocator: PageAllocator,
        table: PageTableState,
        geometry: Geometry,
        transfer: Transfer,
        *,
        clock: Callable[[], float] = time.monotonic,
        staging_pages: int,
        late_s: float = 60.0,
        tries: int = 4,
        pace: Pace | None = None,
    ):
        width = arena.page_widths[0]
        if staging_pages < width:
            raise ValueError(f"staging must hold one commit of {width} pages, got {staging_pages}")
        self.arena, self.allocator, self.table, self.geometry = arena, allocator, table, geometry
        self.staging_pages = staging_pages
        self.counters = Counters()
        self.desired = np.zeros(table.blocks, np.int32)
        self.pace = pace or Pace(clock)
        self._transfer, self._clock, self._late_s = transfer, clock, late_s
        self._retries = Retries(table.blocks, tries)
        self._part_pages = staging_pages // width * width
        self._rank = np.arange(table.blocks)
        self._moves: dict[int, Move] = {}
        self._draining: list[tuple[TransferHandle, int]] = []  # cancelled copies whose words may still live
        self._shapes: dict[tuple[int, int, int], MoveShape] = {}
        starts = [(expert, matrix) for expert in range(table.experts) for matrix in (0, 1)]
        self._host_start = [geometry.host_block_start(*start) for start in starts]
        self._bits_pages = np.zeros((2, 17), np.int64)  # pages of (matrix, bits); 0 bits take none
        self._reserve_pages = np.zeros((2, 17, 17), np.int64)  # what a move of (matrix, from, to) takes at first
        for matrix, bits in product((0, 1), geometry.all_bits):
            self._bits_pages[matrix, bits] = geometry.block_pages(matrix, bits)
            for start in (0, *geometry.all_bits):
                if start != bits:
                    shape = move_shape(geometry, matrix, start, bits, self._part_pages)
                    self._shapes[matrix, start, bits] = shape
                    self._reserve_pages[matrix, start, bits] = shape.reserve

    @property
    def committed(self) -> np.ndarray:
        """int32[n] bits that kernels read; a copy."""
        return self.table.bits.reshape(-1).copy()

    @property
    def moving(self) -> np.ndarray:
        """bool[n]: blocks with a move in flight; requests leave them alone until it lands or fails."""
        mask = np.zeros(self.table.blocks, bool)
        mask[list(self._moves)] = True
        return mask

    @property
    def given_up(self) -> np.ndarray:
        """bool[n]: blocks that failed too often and keep their bits; a policy should leave them alone too."""
        return self._retries.given_up.copy()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, in flight or waiting for another try."""
        return not self._moves and np.array_equal(self.desired, self.table.bits.reshape(-1))

    @property
    def demoting(self) -> bool:
        """Whether demotions are queued or in flight; they go before every promotion."""
        return bool(np.any(self.desired < self.table.bits.reshape(-1)))

    @property
    def staged_pages(self) -> int:
        """Padded pages of words in flight, those of cancelled copies that still run included."""
        self._let_go()
        return sum(move.staged_pages for move in self._moves.values()) + sum(pages for _, pages in self._draining)

    @property
    def reserving_pages(self) -> int:
        """Free pages that queued moves will take before they give any back; those in flight have taken theirs."""
        blocks = np.flatnonzero(self._waiting)
        return int(self._reserve_pages[blocks % 2, self.table.bits.reshape(-1)[blocks], self.desired[blocks]].sum())

    @property
    def releasing_pages(self) -> int:
        """Pages that come free once everything queued and in flight has committed.

        ``free_pages + releasing_pages - reserving_pages`` is what is free in the end.
        """
        matrix = np.arange(self.table.blocks) % 2
        held = self._bits_pages[matrix, self.table.bits.reshape(-1)].sum()
        held += sum(len(move.reserved) for move in self._moves.values())
        return int(held + self.reserving_pages - self._bits_pages[matrix, self.desired].sum())

    def load_initial(self, bits: np.ndarray, progress: Callable[[int, int], None] | None = None) -> None:
        """Load every block at ``bits`` int[n] and wait for it; ``progress(blocks done, all blocks)`` on the way.

        :class:`PageError` where the pages do not fit (nothing is loaded then). What a copy raises passes through,
        and the pager is of no use afterwards.
        """
        bits = self._checked_bits(bits)
        need = int(self._bits_pages[np.arange(self.table.blocks) % 2, bits].sum())
        if need > self.allocator.free_pages or np.any(self.table.bits):
            raise PageError(f"loading takes {need} pages and an empty table; {self.allocator.free_pages} are free")
        self.desired = bits
        queue, done = deque(range(self.table.blocks)), 0
        try:
            while queue or self._moves:
                self._fill(queue)
                move = next(move for move in self._moves.values() if move.state is MoveState.IN_FLIGHT)
                self._land(move)
                self._write(move)
                self.arena.wait()
                if move.state is MoveState.RESIDENT:
                    self._retire(move)
                    done += 1
                    if progress:
                        progress(done, self.table.blocks)
        except BaseException:
            self.close()
            raise
        self.counters.epochs += self.table.apply()

    def request(self, target_bits: np.ndarray, order: Sequence[int] = ()) -> None:
        """Make ``target_bits`` int[n] the wanted precision of every block that is neither moving nor given up.

        It replaces the queue, so a block wanted at its committed bits leaves it. ``order`` lists blocks, most urgent
        first (others follow by number); demotions go before promotions anyhow. ValueError for bits not in the model.
        """
        bits = self._checked_bits(target_bits)
        # A policy sees committed bits of a moving block; taking its word would cancel the move it asked for.
        keep = self.moving | self._retries.given_up
        self.desired = np.where(keep, self.desired, bits).astype(np.int32)
        self._rank = np.arange(self.table.blocks) + len(order)
        self._rank[list(order)] = np.arange(len(order))

    def boundary(
        self, index: int, outcome: Outcome | None = None, *, urgent: bool = False, idle: bool = False
    ) -> BoundaryReport:
        """Collect, commit, retire and start copies between two compiled steps; ``index`` grows by one each time.

        ``urgent``: KV lacks pages now, so demotions are taken whatever they cost; ``idle``: no sequence runs that
        could be held up, so everything is. With ``outcome`` (from a log) it
        waits for exactly these copies, starts exactly these moves and leaves clock and pace alone;
        :class:`PageError` where one of them is not under way, and what a copy raises passes through.
        """
        self.pace.begin()
        self._let_go()
        landed, failed = self._collect(urgent, idle) if outcome is None else self._replayed(outcome)
        blocks = tuple(move.block for move in landed)
        commits = self._commit(landed)
        given_up = [move.block for move, _ in failed if self._fail(move, index)]
        started, blocked_pages = self._fill(deque(self._queue(index) if outcome is None else outcome.started))
        if outcome is not None:
            blocked_pages = outcome.blocked_pages  # moves that the log passed over are not in its ``started``
        report = BoundaryReport(
            boundary=index,
            epoch=self.table.epoch,
            committed=tuple(commits),
            landed=blocks,
            failed=tuple((move.block, reason) for move, reason in failed),
            given_up=tuple(given_up),
            started=tuple(started),
            blocked_pages=blocked_pages,
            queued=int(np.count_nonzero(self._waiting)),
        )
        self.pace.end()
        return report

    def cancel_promotions(self) -> int:
        """Drop every promotion, queued or in flight; returns the reserved pages that are free again at once."""
        return self._cancel(promotions=True)

    def cancel_demotions(self) -> int:
        """Drop every demotion, queued or in flight; returns the reserved pages that are free again at once."""
        return self._cancel(promotions=False)

    def _cancel(self, promotions: bool) -> int:
        moves = [move for move in self._moves.values() if move.promotes == promotions]
        for move in moves:
            self._drop(move)
        bound = np.minimum if promotions else np.maximum
        self.desired = bound(self.desired, self.table.bits.reshape(-1))
        return sum(len(move.reserved) for move in moves)

    def close(self) -> None:
        """Drop every move and return its reservation; the transfer is the caller's to close."""
        for move in list(self._moves.values()):
            self._drop(move)
        self.desired = self.committed

    def check_invariants(self) -> None:
        """Raise :class:`PageError` where a promise of this module is broken; for tests and debugging."""
        self.allocator.check_invariants()
        self.table.validate(self.allocator)
        moves = [move_owner(block) for block in range(self.table.blocks)]
        reserved = {owner: pages for owner in moves if (pages := self.allocator.pages_of(owner))}
        for move in self._moves.values():
            if reserved.pop(move_owner(move.block), 0) != len(move.reserved):
                raise PageError(f"block {move.block} does not own its reservation")
            if not self.allocator.owns(move.reserved, move_owner(move.block)):
                raise PageError(f"block {move.block} reserved pages of others")
            if self.desired[move.block] != move.to_bits or self.table.block_bits(move.block) != move.from_bits:
                raise PageError(f"block {move.block} is moving where nobody wants it")
        if reserved:
            raise PageError(f"pages are reserved for moves that do not exist: {reserved}")
        if self.staged_pages > self.staging_pages:
            raise PageError(f"{self.staged_pages} pages are staged, the budget is {self.staging_pages}")

    # Collect

    def _collect(self, urgent: bool, idle: bool) -> tuple[list[Move], list[tuple[Move, str]]]:
        """Staged moves that the pace lets in, demotions first, and those whose copy failed or is late."""
        failed = []
        now = self._clock()
        for move in self._moves.values():
            if move.state is not MoveState.IN_FLIGHT:
                continue
            assert move.handle is not None
            if move.handle.done():
                try:
                    self.pace.charge(self._land(move).taken_s)
                except Exception as error:  # whatever went wrong with a copy, the old epoch stays
                    failed.append((move, f"{type(error).__name__}: {error}"))
            elif now - move.started_s > self._late_s:
                failed.append((move, f"late: no copy after {now - move.started_s:.1f} s"))
        staged = [move for move in self._moves.values() if move.state is MoveState.STAGED]
        staged.sort(key=lambda move: move.promotes)
        landed = []
        for move in staged:
            if not self.pace.take(move.staged_pages, idle or (urgent and not move.promotes)):
                break
            landed.append(move)
        return landed, failed

    def _replayed(self, outcome: Outcome) -> tuple[list[Move], list[tuple[Move, str]]]:
        under_way = (MoveState.IN_FLIGHT, MoveState.STAGED)
        named = [*outcome.landed, *(block for block, _ in outcome.failed)]
        strange = [b for b in named if b not in self._moves or self._moves[b].state not in under_way]
        if strange:
            raise PageError(f"the log names copies that are not in flight: blocks {strange}")
        landed = [self._moves[block] for block in outcome.landed]
        for move in landed:
            if move.state is MoveState.IN_FLIGHT:
                self._land(move)
        failed = [(self._moves[block], reason) for block, reason in outcome.failed]
        # Copies nobody wants may have ended earlier in the logged run: their staging must be free here too.
        unwanted = [move.handle for move, _ in failed] + [handle for handle, _ in self._draining]
        for handle in unwanted:
            if handle is not None:
                with suppress(Exception):
                    handle.result()
        return landed, failed

    def _land(self, move: Move) -> StagedPages:
        """Wait for the part in flight and hold its words; :class:`TransferError` where it is not all there."""
        assert move.handle is not None
        staged = move.handle.result()
        job = self._job(move)
        shapes = [(width, self.arena.page_words) for width in job.chunks]
        if staged.pages != len(job.pages) or [words.shape for words in staged.words] != shapes:
            raise TransferError(f"the copy was cut short: {staged.pages} of {len(job.pages)} pages")
        move.enter(MoveState.STAGED)
        move.handle, move.staged = None, staged
        return staged

    # Commit and retire

    def _commit(self, landed: list[Move]) -> list[Commit]:
        """Write what landed, put the new epoch in force, then free what no table names."""
        for move in landed:
            self._write(move)
        if landed:
            self.arena.wait()
        self.counters.epochs += self.table.apply()
        commits = []
        for move in (m for m in landed if m.state is MoveState.RESIDENT):
            self._retire(move)
            commits.append(Commit(move.block, move.from_bits, move.to_bits, len(move.writes), len(move.frees)))
            self.counters.promotions += move.promotes
            self.counters.demotions += not move.promotes
        return commits

    def _write(self, move: Move) -> None:
        """Write the staged part to its pages; with the last part, the only one that may overwrite live pages of the
        block, point the table at the new ones."""
        assert move.staged is not None
        staged, ids = move.staged, move.targets[move.part]
        for words in staged.words:
            self.arena.commit_pages(ids[: len(words)], words)
            ids = ids[len(words) :]
        self.counters.pages += staged.pages
        self.counters.bytes += staged.pages * self.geometry.page_bytes
        move.written += staged.pages
        # The budget counts staged words once: this reference must go before the next copies start.
        move.staged, move.staged_pages = None, 0
        if move.written < len(move.writes):
            move.enter(MoveState.HOST)
            return
        move.enter(MoveState.RESIDENT)
        self.allocator.reassign(move.reserved, move_owner(move.block), block_owner(move.block))
        self.table.set_block(move.block, move.to_bits, move.new_ids)

    def _retire(self, move: Move) -> None:
        """The new epoch is in force: free the pages that the block had before."""
        self.allocator.free(move.frees, block_owner(move.block))
        move.enter(MoveState.RETIRED)
        self._retries.succeeded(move.block)
        del self._moves[move.block]

    def _drop(self, move: Move) -> None:
        """Forget a move: its copy drains (and counts as staged until it has ended), its reservation is free."""
        move.enter(MoveState.DROPPED)
        if move.handle is not None:
            move.handle.cancel()
            self._draining.append((move.handle, move.staged_pages))
        move.handle = move.staged = None
        self.allocator.free(move.reserved, move_owner(move.block))
        del self._moves[move.block]

    def _let_go(self) -> None:
        """Forget cancelled copies that have ended, and with them their words."""
        self._draining = [(handle, pages) for handle, pages in self._draining if not handle.done()]

    def _fail(self, move: Move, index: int) -> bool:
        """Drop a failed move and plan another try; True where the block is given up."""
        self._drop(move)
        self.counters.failed += 1
        if not self._retries.failed(move.block, index):
            return False
        self.desired[move.block] = move.from_bits
        return True

    # Start

    @property
    def _waiting(self) -> np.ndarray:
        """bool[n]: blocks whose move has not started."""
        waiting = self.desired != self.table.bits.reshape(-1)
        waiting[list(self._moves)] = False
        return waiting

    def _queue(self, index: int) -> list[int]:
        """Blocks whose move may start at this boundary, demotions first."""
        blocks = np.flatnonzero(self._waiting)
        promotes = self.desired[blocks] > self.table.bits.reshape(-1)[blocks]
        blocks = blocks[np.lexsort((self._rank[blocks], promotes))].tolist()
        return [block for block in blocks if self._retries.may_start(block, index)]

    def _fill(self, queue: deque[int]) -> tuple[list[int], int]:
        """Start copies until the staging budget is full: ``(blocks started, pages the first blocked move lacks)``.

        Waiting parts of running moves go first; the queue is taken from the left and never overtaken for want of
        staging, so a large move cannot starve. A move without free pages is passed over and not waited for.
        """
        started, blocked_pages = [], 0
        for move in self._moves.values():
            if move.state is MoveState.HOST and not self._submit(move):
                return started, blocked_pages
        while queue:
            block = queue[0]
            shape = self._shape(block)
            first_part = min(len(shape.writes), self._part_pages)
            if self.staged_pages + padded_pages(first_part, self.arena.page_widths) > self.staging_pages:
                break
            queue.popleft()
            reserved = self.allocator.alloc(shape.reserve, move_owner(block))
            if reserved is None:
                blocked_pages = blocked_pages or shape.reserve - self.allocator.free_pages
                continue
            bits = self.table.block_bits(block), int(self.desired[block])
            move = make_move(block, *bits, shape, self.table.block_pages(block), reserved, self._part_pages)
            self._moves[block] = move
            self._submit(move)
            started.append(block)
        return started, blocked_pages

    def _submit(self, move: Move) -> bool:
        """Start the next part of a move; False where it does not fit the staging budget now."""
        job = self._job(move)
        size = sum(job.chunks)
        staged = self.staged_pages + size
        if staged > self.staging_pages:
            return False
        move.enter(MoveState.IN_FLIGHT)
        move.handle, move.staged_pages, move.started_s = self._transfer.submit(job), size, self._clock()
        self.counters.staging_peak_pages = max(self.counters.staging_peak_pages, staged)
        return True

    def _job(self, move: Move) -> TransferJob:
        layer, _, _ = self.table.locate(move.block)
        first = self._host_start[move.block % len(self._host_start)]
        pages = tuple(first + page for page in move.writes[move.part])
        return TransferJob(move.block, layer, pages, self.arena.page_widths)

    def _shape(self, block: int) -> MoveShape:
        return self._shapes[block % 2, self.table.block_bits(block), int(self.desired[block])]

    def _checked_bits(self, bits: np.ndarray) -> np.ndarray:
        bits = np.array(bits, np.int32).reshape(-1)
        if bits.shape != (self.table.blocks,):
            raise ValueError(f"a plan has one number of bits a block: {self.table.blocks}, got {bits.size}")
        wrong = sorted(set(bits.tolist()) - set(self.geometry.all_bits))
        if wrong:
            allowed = ", ".join(map(str, self.geometry.all_bits))
            raise ValueError(f"blocks cannot have {wrong[0]} bits; this model has {allowed}")
        return bits

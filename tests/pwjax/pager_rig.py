"""A pager over a fake store, with whatever faults a test wants, and what must always hold of it."""

from dataclasses import replace

import jax
import numpy as np

from pallas_kernels.pages import BlockShape, Geometry
from pwjax.memory.allocator import PageAllocator
from pwjax.memory.arena import Arena
from pwjax.memory.faults import FakeStore, Fate, FaultyTransfer
from pwjax.memory.page_table import PageTableState
from pwjax.memory.pager import Pager
from pwjax.memory.transfer import ThreadTransfer

GEOMETRY = Geometry(64, (2, 3, 4), True, BlockShape(32, 64, 4), BlockShape(32, 96, 4))
LAYERS, EXPERTS, BLOCKS = 2, 2, 8
WIDTHS = (4, 16)


def stored_words(store, table, block):
    """What the store holds of a block at its bits in ``table``: uint32[pages, words]."""
    layer, expert, matrix = table.locate(block)
    host = GEOMETRY.host_pages(matrix, table.block_bits(block))
    return store.read(layer, GEOMETRY.host_block_start(expert, matrix) + np.array(host))


def block_pages(bits):
    """Pages of all blocks at ``bits`` int[BLOCKS]."""
    return sum(GEOMETRY.block_pages(block % 2, int(width)) for block, width in enumerate(bits))


class FreeCopies(ThreadTransfer):
    """Threads whose processor time is not charged: where a clock stands still, a busy machine would use up the pace."""

    def _copy(self, job):
        return replace(super()._copy(job), taken_s=0.0)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Rig:
    """A pager over a fake store; ``fate`` decides what becomes of each copy once the first load is done."""

    def __init__(self, bits=3, *, fate=None, spare=0, staging=32, transfer=None, pages=None, **options):
        bits = np.broadcast_to(bits, BLOCKS)
        need = block_pages(bits)
        self.store, self.clock, self.fate = FakeStore(64), Clock(), fate
        self.loaded = False
        self.transfer = transfer or FaultyTransfer(self.store, self._fate)
        # One arena size for all tests, so that programs compile once; a filler leaves exactly ``spare`` free.
        self.allocator = PageAllocator(300)
        self.filler = 299 - (pages or need + spare)
        self.allocator.alloc(self.filler, ("filler", 0))
        self.arena = Arena(self.allocator.num_pages, 64, WIDTHS)
        self.table = PageTableState(LAYERS, EXPERTS, GEOMETRY)
        self.pager = Pager(
            self.arena, self.allocator, self.table, GEOMETRY, self.transfer,
            clock=self.clock, staging_pages=staging, **options,
        )  # fmt: skip
        self.pager.load_initial(bits)
        self.loaded = True
        self.index = 0

    def _fate(self, job):
        return self.fate(job) if self.loaded and self.fate else Fate()

    def boundary(self, outcome=None):
        before, epoch = self.pager.committed, self.table.epoch
        report = self.pager.boundary(self.index, outcome)
        self.index += 1
        changed = np.flatnonzero(before != self.pager.committed).tolist()
        assert sorted(c.block for c in report.committed) == changed
        assert report.epoch == self.table.epoch == epoch + bool(changed)
        return report

    def settle(self, limit=200):
        reports = []
        while not self.pager.idle:
            reports.append(self.boundary())
            assert len(reports) < limit
        return reports

    def check(self):
        """Invariants, and every slot of the device table shows the page of the host that it should."""
        self.pager.check_invariants()
        bits, pages = (np.array(jax.numpy.copy(x)) for x in (self.table.table.bits, self.table.table.pages))
        np.testing.assert_array_equal(bits.reshape(-1), self.pager.committed)
        for block in range(BLOCKS):
            layer, expert, matrix = self.table.locate(block)
            slots = list(GEOMETRY.table_slots(matrix, int(bits[layer, expert, matrix])))
            ids = pages[layer, expert, matrix][slots]
            words = self.arena.read_pages(np.resize(ids, GEOMETRY.slots))[: len(ids)]
            np.testing.assert_array_equal(words, stored_words(self.store, self.table, block))


def plan(**bits):
    """Plan of 3 bits everywhere but ``b<block>=bits``."""
    target = np.full(BLOCKS, 3)
    for name, value in bits.items():
        target[int(name[1:])] = value
    return target

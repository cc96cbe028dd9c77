"""What an engine is assembled from, and the two views of it that leave it: a static model, and a snapshot."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from planner import BlockTable, Observation, Policy
from pwjax.engine.budget import MemoryPlan
from pwjax.engine.decisions import Decisions
from pwjax.engine.log import LogSink
from pwjax.engine.meter import Meter
from pwjax.engine.steps import StepShapes
from pwjax.engine.text import Tokenizer
from pwjax.memory import Arena, KVPages, PageAllocator, Pager, PageTableState, Prefixes
from pwjax.memory.host_store import HostStore
from pwjax.memory.transfer import Transfer


@dataclass(frozen=True)
class Model:
    """What a forward needs besides arrays; hashable, so it can be a static argument."""

    shapes: StepShapes

    @property
    def config(self):
        """The model's configuration."""
        return self.shapes.config

    @property
    def geometry(self):
        """Page geometry of the arena."""
        return self.shapes.geometry


class Snapshot(NamedTuple):
    """What :func:`pwjax.plan` works from: the block table, the state of the arena, and bytes of a page."""

    table: BlockTable
    observation: Observation
    page_bytes: int


class Parts(NamedTuple):
    """Everything an engine is assembled from; made by :func:`pwjax.load`."""

    shapes: StepShapes
    memory: MemoryPlan
    table: BlockTable
    params: dict
    programs: dict[tuple[str, int], jax.stages.Compiled]
    arena: Arena
    allocator: PageAllocator
    kv: KVPages
    page_table: PageTableState
    pager: Pager
    transfer: Transfer
    store: HostStore
    policy: Policy
    decisions: Decisions
    tokenizer: Tokenizer | None
    meter: Meter
    log: LogSink
    start_bits: np.ndarray
    moves: bool
    seed: int
    prefixes: Prefixes
    damage_per_ms: float
    shadow: float | None

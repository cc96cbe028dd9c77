"""A model from disk to the device: dense parameters, and every block in the pages of a new arena."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.tree import dense_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.engine.meter import Meter
from pwjax.memory import Arena, PageAllocator, Pager, PageTableState, ThreadTransfer
from pwjax.memory.arena import free
from pwjax.memory.host_store import HostStore
from pwjax.memory.transfer import Transfer


class Weights(NamedTuple):
    """A model on the device: dense parameters, an arena with every block in it, and what moves blocks later."""

    params: dict
    arena: Arena
    allocator: PageAllocator
    page_table: PageTableState
    pager: Pager
    transfer: Transfer
    store: HostStore

    def close(self) -> None:
        """End the threads, close the files and free the device memory; harmless when done twice."""
        self.pager.close()
        self.transfer.close()
        self.store.close()
        free((self.params, self.arena.array, self.page_table.table))


def load_weights(
    artifact: Artifact,
    bits: np.ndarray,
    num_pages: int,
    staging_pages: int,
    *,
    kv_shapes: Sequence[tuple[int, int]] = (),
    meter: Meter | None = None,
    progress: Callable[[int, int], None] | None = None,
    make_transfer: Callable[[HostStore], Transfer] = ThreadTransfer,
    clock: Callable[[], float] = time.perf_counter,
) -> Weights:
    """Put the parameters and all blocks at ``bits`` int[n] on the device, in a new arena of ``num_pages``.

    ``kv_shapes``: KV commits to compile, see :class:`Arena`. ``meter`` is read after every block;
    ``progress(blocks, all blocks)``. Compile programs first: they may need room that the arena takes. The caller
    closes pager, transfer and store. Raises ArtifactError for pages that are damaged.
    """
    config, geometry = artifact.config, artifact.geometry
    params = jax.tree.map(lambda a: jax.device_put(a.view(np.uint16)), artifact.dense_params())
    arena = Arena(num_pages, geometry.page_words, kv_shapes=kv_shapes)
    allocator = PageAllocator(num_pages)
    page_table = PageTableState(config.num_layers, config.num_experts, geometry)
    store = artifact.host_store()
    transfer = make_transfer(store)
    pager = Pager(arena, allocator, page_table, geometry, transfer, staging_pages=staging_pages, clock=clock)

    def loaded(done: int, total: int) -> None:
        if meter:
            meter.observe()
        if progress:
            progress(done, total)

    try:
        pager.load_initial(bits, loaded)
    except BaseException:
        transfer.close()
        store.close()
        arena.delete()
        raise
    return Weights(params, arena, allocator, page_table, pager, transfer, store)


def params_spec(config: ModelConfig) -> dict:
    """Shapes of the dense parameters as they lie on the device: the bits of bfloat16."""
    return unflatten({name: jax.ShapeDtypeStruct(s, np.uint16) for name, s in dense_shapes(config).items()})

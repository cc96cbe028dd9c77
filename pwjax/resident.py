"""A model with every page of every precision on the device at once: any plan is then a page table into one arena.

For research, not for serving: it takes the whole artifact's bytes and no budget looks after them. The arena is the
artifact, page file after page file behind the null page, so a table costs a few NumPy operations and no copy::

    resident = Resident.load("model.pw")
    logits = pwjax.forward(resident.model, resident.params, resident.table(4), resident.arena, tokens)
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.checkpoints.artifact import Artifact
from pwjax.config import ModelConfig
from pwjax.errors import UsageError
from pwjax.loading import open_model
from pwjax.memory import PageTable


@dataclass(frozen=True)
class Model:
    """What a forward needs besides arrays; hashable, so it can be a static argument."""

    config: ModelConfig
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class Resident:
    """``params`` float32 pytree of the dense parameters, ``arena`` uint32[pages, page_words] with all pages."""

    model: Model
    params: dict
    arena: jax.Array

    @classmethod
    def load(cls, model: str | os.PathLike | Artifact | None = None) -> "Resident":
        """Read the artifact at ``model`` (None: the bundled one) whole, every page checked. ArtifactError."""
        artifact = model if isinstance(model, Artifact) else open_model(model)
        config, geometry = artifact.config, artifact.geometry
        with artifact.host_store() as store:
            layers = [store.read(layer, range(store.layer_pages)) for layer in range(config.num_layers)]
        null = np.zeros((1, geometry.page_words), np.uint32)
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), artifact.dense_params())
        return cls(Model(config, geometry), params, jnp.asarray(np.concatenate([null, *layers])))

    def table(self, bits: int | np.ndarray) -> PageTable:
        """Page table of a plan: ``bits`` one width, or int[n] in block order (``plan.bits``). UsageError."""
        config, geometry = self.model.config, self.model.geometry
        wanted = np.asarray(bits, np.int64)
        wanted = np.full(config.blocks, wanted) if wanted.ndim == 0 else wanted.reshape(-1)
        if wanted.shape != (config.blocks,) or not set(wanted.tolist()) <= set(geometry.all_bits):
            allowed = ", ".join(map(str, geometry.all_bits))
            raise UsageError(f"a plan has {config.blocks} bits, each one of {allowed}; got {sorted(set(wanted))}")
        pages = np.zeros((config.blocks, geometry.slots), np.int32)
        block = np.arange(config.blocks)
        starts = [geometry.host_block_start(e, m) for e in range(config.num_experts) for m in (0, 1)]
        per_layer = 2 * config.num_experts
        first = (
            1 + block // per_layer * geometry.host_layer_pages(config.num_experts) + np.tile(starts, config.num_layers)
        )
        for matrix in (0, 1):
            for width in set(wanted[matrix::2].tolist()):
                rows = np.flatnonzero((wanted == width) & (block % 2 == matrix))
                slots, host = geometry.table_slots(matrix, width), geometry.host_pages(matrix, width)
                pages[np.ix_(rows, np.array(slots))] = first[rows, None] + np.asarray(host)
        shape = (config.num_layers, config.num_experts, 2)
        return PageTable(
            jnp.asarray(wanted.reshape(shape), jnp.int32), jnp.asarray(pages.reshape(*shape, -1)), jnp.int32(0)
        )

    def tables(self, plans: Sequence[int | np.ndarray]) -> PageTable:
        """Tables of several plans with a leading axis, for ``jax.vmap`` over plans."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(self.table(bits) for bits in plans))

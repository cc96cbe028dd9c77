"""A whole model of random weights as the engine's compiled decode step, to time its steps at each width.

Nothing is loaded: parameters, pages and KV are random bits that are finite numbers, and page tables are filled by hand,
so a model of many gigabytes is there in seconds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.byte_table import expected_geometry
from pwjax.config import ModelConfig
from pwjax.engine.sampling import SamplingArrays
from pwjax.engine.steps import STOP_IDS, Slots, StepShapes, compile_step
from pwjax.engine.weights import params_spec
from pwjax.memory.page_table import PageTable

# Clears the highest bits of exponents, so that every 16-bit half is a finite number.
FINITE = 0x2FFF2FFF


class RandomModel:
    """Decode steps of ``slots`` sequences that have ``past`` tokens each; ``tokens`` tokens a dispatch."""

    def __init__(self, config: ModelConfig, slots: int, past: int, tokens: int = 8, widths: tuple = (2, 3, 4, 5, 6)):
        self.config, self.tokens, self._past = config, tokens, past
        self.geometry: Geometry = expected_geometry(config, widths, True, (4, 4))
        self.shapes = StepShapes(config, self.geometry, slots, past + tokens, (256,), tokens, "bfloat16")
        rng = np.random.default_rng(0)
        experts = config.num_layers, config.num_experts, 2, self.geometry.slots
        kv = [kind.table_shape(slots) for kind in self.shapes.kv_kinds]
        sizes = [int(np.prod(shape)) for shape in (experts, *kv)]
        ids = np.split(1 + rng.permutation(sum(sizes)).astype(np.int32), np.cumsum(sizes)[:-1])
        self._pages, *self._kv = (jnp.asarray(i.reshape(s)) for i, s in zip(ids, (experts, *kv), strict=True))
        self.num_pages = 1 + sum(sizes)
        self._params = jax.tree.map(
            lambda a: jax.random.bits(jax.random.key(0), a.shape, a.dtype) & jnp.uint16(FINITE & 0xFFFF),
            params_spec(config),
        )
        self._step = compile_step(self.shapes, ("decode", tokens), self.num_pages, self._params)
        shape = self.num_pages, self.geometry.page_words
        make = jax.jit(lambda key: jax.random.bits(key, shape, jnp.uint32) & jnp.uint32(FINITE))
        self._arena = make(jax.random.key(1))

    def run(self, bits: int) -> jax.Array:
        """One dispatch with all experts at ``bits``: int32[tokens, slots] token ids."""
        slots = self.shapes.slots
        table = PageTable(jnp.full(self._pages.shape[:3], bits, jnp.int32), self._pages, jnp.int32(0))
        arguments = Slots(
            past=jnp.full((slots,), self._past, jnp.int32),
            limit=jnp.full((slots,), self.tokens, jnp.int32),
            stop_ids=jnp.full((slots, STOP_IDS), -1, jnp.int32),
            seeds=jnp.zeros((slots,), jnp.uint32),
            params=SamplingArrays(*map(jnp.asarray, SamplingArrays.of([None] * slots))),
            want_top=jnp.asarray(False),
        )
        last = jnp.zeros((slots,), jnp.int32)
        sampled, *_ = self._step(self._params, self._arena, table, tuple(self._kv), last, arguments)
        return sampled.token

"""KL divergence of any plan from 16 bits on fixed windows of tokens, over the full vocabulary.

Every block lies in the arena at every width, page for page as in the artifact's files, so a plan is nothing but a page
table: no page moves and nothing compiles from one plan to the next. The 16-bit side is kept as final hidden states
(float32, hidden size a token), and the head runs on both sides; that is exact and far smaller than log-probabilities.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.pages import Geometry
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.weights import params_spec
from pwjax.errors import PWJaxError
from pwjax.evaluate.program import HEAD_TOKENS, ScoreShapes
from pwjax.memory.page_table import PageTable
from pwjax.models import Paged, forward, logits

# Tokens of one dispatch: enough that each expert is dequantized for many tokens, few enough for a small machine.
DISPATCH_TOKENS = 4096


def kl_from_logits(reference: jax.Array, scores: jax.Array) -> jax.Array:
    """``KL(softmax(reference) || softmax(scores))`` along the last axis, nats.

    Written as ``sum p (exp(-d) - 1 + d)`` with ``d = log p - log q``, whose terms are never negative: the usual
    ``sum p d`` loses a divergence of 1e-6 in the rounding of logarithms.
    """
    log_p, log_q = jax.nn.log_softmax(reference, -1), jax.nn.log_softmax(scores, -1)
    p, d = jnp.exp(log_p), log_p - log_q
    # exp(-d) could overflow where p is next to nothing; there the plain form is exact enough.
    near = d > -8
    terms = jnp.where(near, p * (jnp.expm1(-jnp.where(near, d, 0.0)) + d), jnp.exp(log_q) - p + p * d)
    return jnp.maximum(terms.sum(-1), 0.0)


def _divergence(shapes: ScoreShapes, params, arena, table, tokens, reference) -> tuple[jax.Array, jax.Array]:
    paged = Paged(arena, table.bits, table.pages, shapes.geometry)
    hidden = forward(shapes.config, params, tokens, paged=paged).hidden
    rows = jnp.stack([reference, hidden]).reshape(2, -1, hidden.shape[-1])
    count = rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, -count % HEAD_TOKENS), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(2, -1, HEAD_TOKENS, rows.shape[-1]), 1, 0)
    kl = lax.map(lambda part: kl_from_logits(*logits(shapes.config, params, part)), rows)
    return kl.reshape(-1)[:count].reshape(tokens.shape), hidden


@lru_cache(maxsize=4)
def compile_divergence(shapes: ScoreShapes, num_pages: int) -> jax.stages.Compiled:
    """Program ``(params, arena, table, tokens int32[B, W], reference float32[B, W, H]) -> (kl, hidden)``.

    ``kl`` float32[B, W] is the divergence of each token from the final hidden states ``reference``; ``hidden`` are the
    plan's own, which one run at 16 bits turns into the reference of all others.
    """
    spec: Any = jax.ShapeDtypeStruct
    config, geometry = shapes.config, shapes.geometry
    blocks = (config.num_layers, config.num_experts, 2)
    table = PageTable(spec(blocks, jnp.int32), spec((*blocks, geometry.slots), jnp.int32), spec((), jnp.int32))
    arena, tokens = spec((num_pages, geometry.page_words), jnp.uint32), spec((shapes.batch, shapes.window), jnp.int32)
    reference = spec((shapes.batch, shapes.window, config.hidden_size), jnp.float32)
    program = jax.jit(partial(_divergence, shapes))
    return program.lower(params_spec(config), arena, table, tokens, reference).compile()


def whole_pages(geometry: Geometry, experts: int, layer: int, bits: np.ndarray) -> np.ndarray:
    """Page table int32[E, 2, S] of a layer whose blocks at ``bits`` int[E, 2] lie in an arena of all host pages.

    Such an arena is the null page, then the page files of all layers.
    """
    pages = np.zeros((experts, 2, geometry.slots), np.int32)
    first = 1 + layer * geometry.host_layer_pages(experts)
    for expert in range(experts):
        for matrix in (0, 1):
            width = int(bits[expert, matrix])
            start = first + geometry.host_block_start(expert, matrix)
            slots = list(geometry.table_slots(matrix, width))
            pages[expert, matrix, slots] = start + np.array(geometry.host_pages(matrix, width))
    return pages


class Divergence:
    """A model with all its pages on the device and the 16-bit side of ``windows``; free it with :meth:`close`.

    ``windows`` int32[n, W], whole windows of one length. ``reference_bits``: 16, or the widest that there is.
    """

    def __init__(
        self, artifact: Artifact, windows: np.ndarray, progress: Callable[[int, int], None] = lambda done, total: None
    ):
        config, geometry = artifact.config, artifact.geometry
        self.windows, self.reference_bits = windows, geometry.all_bits[-1]
        batch = max(1, min(len(windows), DISPATCH_TOKENS // windows.shape[1]))
        self._shapes = ScoreShapes(config, geometry, batch, windows.shape[1])
        num_pages = 1 + config.num_layers * geometry.host_layer_pages(config.num_experts)
        self._program = compile_divergence(self._shapes, num_pages)
        self._params = jax.tree.map(lambda a: jax.device_put(a.view(np.uint16)), artifact.dense_params())
        self._arena = _all_pages(artifact, progress)
        self._batches = []
        table = self._table(np.full(config.blocks, self.reference_bits))
        empty = jnp.zeros((batch, windows.shape[1], config.hidden_size), jnp.float32)
        for start in range(0, len(windows), batch):
            part = windows[start : start + batch]
            tokens = jax.device_put(np.concatenate([part, np.repeat(part[:1], batch - len(part), 0)]).astype(np.int32))
            _, reference = self._program(self._params, self._arena, table, tokens, empty)
            self._batches.append((tokens, reference))

    def measure(self, bits: np.ndarray) -> np.ndarray:
        """Mean KL of a token of each window, float64[n], nats, of the plan ``bits`` int[blocks] (rows of BlockTable).

        PWJaxError where it is not finite.
        """
        table = self._table(bits)
        parts = [self._program(self._params, self._arena, table, *batch)[0] for batch in self._batches]
        kl = np.concatenate(jax.device_get(parts)).astype(np.float64)[: len(self.windows)].mean(1)
        if not np.isfinite(kl).all():
            raise PWJaxError("the model gives likelihoods that are not finite; its parameters may be damaged")
        return kl

    def close(self) -> None:
        """Free the device memory; harmless when done twice."""
        for array in jax.tree.leaves((self._params, self._arena, self._batches)):
            if not array.is_deleted():
                array.delete()

    def __enter__(self) -> "Divergence":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _table(self, bits: np.ndarray) -> PageTable:
        config, geometry = self._shapes.config, self._shapes.geometry
        bits = np.asarray(bits, np.int32).reshape(config.num_layers, config.num_experts, 2)
        pages = [whole_pages(geometry, config.num_experts, layer, row) for layer, row in enumerate(bits)]
        return jax.device_put(PageTable(bits, np.stack(pages), np.int32(0)))  # pyright: ignore[reportArgumentType]


def _all_pages(artifact: Artifact, progress: Callable[[int, int], None]) -> jax.Array:
    """Arena uint32[1 + pages, page_words] with the null page and every page file."""
    config, geometry = artifact.config, artifact.geometry
    layer_pages = geometry.host_layer_pages(config.num_experts)
    words = np.zeros((1 + config.num_layers * layer_pages, geometry.page_words), np.uint32)
    with artifact.host_store() as store:
        for layer in range(config.num_layers):
            words[1 + layer * layer_pages :][:layer_pages] = store.read(layer, range(layer_pages))
            progress(layer + 1, config.num_layers)
    return jax.device_put(words)

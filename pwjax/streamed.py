"""Our decoders as calibration sees them: one layer on the device at a time, experts at 16 bits or fewer."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from calib.anyprecision import QuantizedBlock, dequantize
from calib.model import Trace
from pallas_kernels.bitplanes import pages_to_rows, split_bf16_rows, unpack_block
from pallas_kernels.pages import Geometry
from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tree import EXPERTS, unflatten
from pwjax.config import ModelConfig
from pwjax.memory.host_store import HostStore
from pwjax.models import decoder_layer, logits, whole_sequences
from pwjax.models.layers import activate, rms_norm

# Tokens whose logits exist at once.
HEAD_TOKENS = 128


@dataclass(frozen=True)
class DecoderFunctions:
    """The arithmetic of one model family as ``calib.model.Functions``."""

    config: ModelConfig

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.config.num_experts

    def run(self, kind: Any, params: dict, x: jax.Array, bump: jax.Array) -> tuple[jax.Array, Trace]:
        """Output of a layer and what its experts saw."""
        batch, length, hidden = x.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        out = decoder_layer(
            self.config, kind, params, x, positions, jnp.ones((batch, length), bool), whole_sequences(kind),
            bump=bump.reshape(-1, hidden),
        )  # fmt: skip
        return out.x, Trace(*(a.reshape(batch, length, -1) for a in out.trace))

    def loss(self, head: dict, x: jax.Array, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Summed loss of tokens that the model draws, and the mean one of the next tokens, piece by piece."""
        length = len(tokens)
        pieces = -(-length // HEAD_TOKENS)
        room = pieces * HEAD_TOKENS - length
        known = jnp.pad(jnp.ones(length - 1), (0, room + 1))
        following = jnp.pad(tokens[1:], (0, room + 1))
        present = jnp.pad(jnp.ones(length), (0, room))

        @jax.checkpoint
        def piece(x, following, known, present, key):
            hidden = rms_norm(x, head["norm"]["scale"], self.config.rms_eps)
            scores = jax.nn.log_softmax(logits(self.config, head, hidden), axis=-1)
            drawn = jax.random.categorical(key, lax.stop_gradient(scores))
            pick = lambda token: -jnp.take_along_axis(scores, token[:, None], 1)[:, 0]  # noqa: E731
            return (pick(drawn) * present).sum(), (pick(following) * known).sum()

        cut = lambda a: a.reshape(pieces, HEAD_TOKENS, *a.shape[1:])  # noqa: E731
        inputs = map(cut, (jnp.pad(x, ((0, room), (0, 0))), following, known, present))
        drawn, real = lax.map(lambda item: piece(*item), (*inputs, jax.random.split(key, pieces)))
        return drawn.sum(), real.sum() / max(length - 1, 1)

    def inner(self, x: jax.Array, gate_up: jax.Array) -> jax.Array:
        """Input of ``down``."""
        gate, up = jnp.split(x @ gate_up.T, 2, axis=-1)
        return activate(self.config, gate) * up


class StreamedDecoder:
    """A ``calib.model.StreamedModel`` over parameters that are read layer by layer."""

    def __init__(self, source: ParamSource):
        self.config, self._source = source.config, source
        self.functions = DecoderFunctions(self.config)
        self.num_layers, self.hidden_size = self.config.num_layers, self.config.hidden_size
        self._outer = source.outer()

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Input float32[B, T, H] of layer 0."""
        return self._outer["embed/embedding"][tokens].astype(np.float32) * np.float32(self.config.embed_scale)

    def kind(self, layer: int) -> Hashable:
        """The layer's kind of attention."""
        return self.config.attention_kinds[self.config.layer_kinds[layer]]

    def layer(self, layer: int) -> dict:
        """Parameters of a layer on the device, as bits of bfloat16."""
        # One by one: beside what is on the device, one of them is in host memory.
        names = self._source.names(layer)
        flat = {name.removeprefix("layers/"): _bits(self._source.read(name, layer)) for name in names}
        return {"attn" if name.startswith("attn") else name: tree for name, tree in unflatten(flat).items()}

    def head(self) -> dict:
        """Final norm and head on the device, as bits of bfloat16."""
        used = "embed/embedding" if self.config.tie_embeddings else "lm_head/kernel"
        return unflatten({name: _bits(self._outer[name]) for name in ("norm/scale", used)})


class CodedExperts:
    """Quantized experts in a directory of page files; close it after use."""

    def __init__(self, page_dir: Path, geometry: Geometry, config: ModelConfig):
        self.geometry, self._config = geometry, config
        self._store = HostStore(page_dir, geometry, config.num_layers, config.num_experts)

    def block(self, layer: int, expert: int, matrix: int) -> QuantizedBlock:
        """Codes and tables of one block."""
        first = self.geometry.host_block_start(expert, matrix)
        pages = self._store.read(layer, range(first, first + self.geometry.host_block_pages(matrix)))
        return QuantizedBlock(*unpack_block(pages, self.geometry, matrix))

    def original(self, layer: int, expert: int, matrix: int) -> np.ndarray:
        """Weights bfloat16[out, in] of one block from its 16-bit rows."""
        layout, shape = self.geometry.dense_layout(matrix), self.geometry.shape(matrix)
        first = self.geometry.host_block_start(expert, matrix)
        pages = self._store.read(layer, [first + page for page in self.geometry.host_pages(matrix, 16)])
        return split_bf16_rows(pages_to_rows(pages, layout), shape.cols)

    def at(self, source: ParamSource, bits: int) -> ParamSource:
        """``source`` with its experts at ``bits``, rounded to bfloat16."""
        shapes = [source.flat[name].shape for name in EXPERTS]
        stacks = {
            name: LayerStack(shape, partial(self._layer, matrix, bits))
            for matrix, (name, shape) in enumerate(zip(EXPERTS, shapes, strict=True))
        }
        return ParamSource(source.config, {**source.flat, **stacks})

    def close(self) -> None:
        """Close the files."""
        self._store.close()

    def __enter__(self) -> "CodedExperts":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def _layer(self, matrix: int, bits: int, layer: int) -> np.ndarray:
        experts, shape = self._config.num_experts, self.geometry.shape(matrix)
        out = np.empty((experts, shape.rows, shape.cols), ml_dtypes.bfloat16)
        for expert in range(experts):
            out[expert] = dequantize(self.block(layer, expert, matrix), bits)
        return out


def _bits(value: np.ndarray) -> jax.Array:
    """Bits of bfloat16 on the device; the copy is over, so that ``value`` can go."""
    return jax.block_until_ready(jnp.asarray(value.view(np.uint16)))

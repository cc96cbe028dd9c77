"""What a model takes in bytes, from its configuration alone: dense parts, experts at every width, KV a token.

Two counts of the experts stand side by side. *Plain* is any-precision as published: planes and one float16 LUT a row,
nothing rounded. *Paged* is what the engine allocates: LUTs shared by groups of rows, row scales, whole pages.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from calib.lut_groups import choose_lut_rows
from pallas_kernels.pages import Geometry
from planner.tables import BlockTable
from pwjax.checkpoints.manifest import block_shapes, geometry_for
from pwjax.checkpoints.tree import dense_shapes
from pwjax.config import ModelConfig

WIDTHS = (2, 3, 4, 5, 6)
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# Rows of normally distributed weights that the LUT groups are judged by.
_SAMPLE_ROWS = 64
_PARTS = {"embed": "embedding", "lm_head": "head", "router": "router", "shared": "shared expert", "mlp": "dense MLP"}


@dataclass(frozen=True)
class KVKind:
    """KV cache of one kind of layers: how many ``layers``, bytes of K and V of one token in all of them together,
    and the ``window`` of tokens that are kept (None: all)."""

    name: str
    layers: int
    token_bytes: int
    window: int | None

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` tokens needs to keep."""
        return self.token_bytes * (tokens if self.window is None else min(tokens, self.window))


@lru_cache
def expected_geometry(
    config: ModelConfig,
    widths: tuple[int, ...] = WIDTHS,
    fallback: bool = True,
    lut_rows: tuple[int, int] | None = None,
) -> Geometry:
    """Page geometry that quantizing would take where all weights were normally distributed.

    Without weights this is the best guess: quantizing judges LUT groups by the error on the weights themselves.
    ``lut_rows`` fixes the groups of gate_up and down. ValueError where no page holds a row.
    """
    shapes, rng = block_shapes(config), np.random.default_rng(0)
    samples = tuple([(rng.standard_normal((min(rows, _SAMPLE_ROWS), cols), np.float32), None)] for rows, cols in shapes)
    candidates = None if lut_rows is None else ((lut_rows[0],), (lut_rows[1],))
    choice = choose_lut_rows(samples, shapes, widths, fallback, config.kv_row_words(2), candidates)
    return geometry_for(config, choice.lut_rows, choice.page_words, widths, fallback)


def dense_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of what is never paged, by part, in bfloat16."""
    parts: dict[str, int] = {}
    for name, shape in dense_shapes(config).items():
        key = name.removeprefix("layers/").split("/")[0]
        part = "attention" if key.startswith("attn") and "_norm" not in key else _PARTS.get(key, "norms and scales")
        parts[part] = parts.get(part, 0) + 2 * prod(shape)
    return parts


def plain_bytes(config: ModelConfig, bits: int) -> dict[str, int]:
    """``planes`` and ``luts`` of all experts at ``bits``, not rounded; at 16 bits ``rows``."""
    experts = config.num_layers * config.num_experts
    if bits == 16:
        return {"rows": 2 * config.expert_params}
    luts = sum(rows * 2**bits * 2 for rows, _ in block_shapes(config))
    return {"planes": config.expert_params * bits // 8, "luts": experts * luts}


def paged_bytes(config: ModelConfig, geometry: Geometry, bits: int) -> dict[str, int]:
    """The same as the engine allocates it, in whole pages."""
    blocks = config.num_layers * config.num_experts * geometry.page_bytes
    if bits == 16:
        return {"rows": blocks * sum(geometry.dense_layout(m).pages for m in (0, 1))}
    return {
        "planes": blocks * bits * sum(geometry.plane_layout(m).pages for m in (0, 1)),
        "luts": blocks * sum(geometry.lut_layout(m, bits).pages for m in (0, 1)),
    }


def kv_kinds(config: ModelConfig, kv_dtype: str = "bfloat16") -> list[KVKind]:
    """KV cache a token by kind of attention, not rounded to pages."""
    item_bytes = DTYPE_BYTES[kv_dtype]
    return [
        KVKind(kind.name, len(layers), 2 * len(layers) * kind.kv_heads * kind.head_dim * item_bytes, kind.window)
        for kind, layers in zip(config.attention_kinds, config.kind_layers, strict=True)
    ]


@dataclass(frozen=True)
class Unquantized:
    """Stands where an artifact would in planning: a model of which only the configuration is there.

    ``table`` makes all blocks equal in damage a weight, fourfold with each bit less, and all experts equally likely.
    """

    config: ModelConfig
    geometry: Geometry

    def table(self, kind: str | None = None, preferred: str | None = None) -> BlockTable:
        """Pages as they will be; ``kind`` of damage makes no difference."""
        geometry, config = self.geometry, self.config
        params = np.array([geometry.shape(m).params for m in (0, 1)], float)
        loss = np.array([0.0 if bits == 16 else 4.0**-bits for bits in geometry.all_bits])
        pages = [[geometry.block_pages(m, bits) for bits in geometry.all_bits] for m in (0, 1)]
        each = config.blocks // 2
        return BlockTable(
            layers=config.num_layers,
            experts=config.num_experts,
            widths=geometry.all_bits,
            damage=np.tile(params[:, None] * loss, (each, 1)),
            pages=np.tile(np.array(pages, np.int64), (each, 1)),
            params=np.tile(params.astype(np.int64), each),
            routing_mass=np.full((config.num_layers, config.num_experts), 1 / config.num_experts),
        )


def describe(config: ModelConfig, geometry: Geometry, tokens: int, kv_dtype: str = "bfloat16") -> dict[str, Any]:
    """JSON-ready table of all bytes; KV also for one sequence of ``tokens`` tokens."""
    kinds = kv_kinds(config, kv_dtype)
    return {
        "layers": config.num_layers,
        "experts": config.num_experts,
        "expert_weights": config.expert_params,
        "dense_bytes": dense_bytes(config),
        "expert_bytes": {
            str(bits): {"plain": plain_bytes(config, bits), "paged": paged_bytes(config, geometry, bits)}
            for bits in geometry.all_bits
        },
        "page_bytes": geometry.page_bytes,
        "lut_rows": {"gate_up": geometry.gate_up.lut_rows, "down": geometry.down.lut_rows},
        "kv_dtype": kv_dtype,
        "kv": [asdict(kind) for kind in kinds],
        "sequence_tokens": tokens,
        "sequence_bytes": sum(kind.sequence_bytes(tokens) for kind in kinds),
    }

"""Sizes of the GPU kernels for the shapes of real models, from the ``tuned.json`` beside this file."""

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from pallas_kernels.pages import Geometry


@dataclass(frozen=True)
class Blocks:
    """How the work of one expert_ffn is cut.

    ``rows`` x ``words[matrix]``: a tile of weights, in matrix rows (gate and up rows together) and words of 32 columns;
    ``warps`` work on it. ``register_bits``: widths up to it keep a row's table in registers. ``stream_tokens``: most
    choices that share one pass over an expert's planes. ``grouped_from``: choices an expert, on average, from which
    experts are dequantized first; then in products of ``block_m`` (at most) x ``block_n`` x ``block_k`` by
    ``product_warps`` in ``stages``, with at most ``scratch_bytes`` of dequantized weights. All but the last are powers
    of two, which Triton asks for.
    """

    rows: int = 32
    words: tuple[int, int] = (16, 16)
    warps: int = 4
    register_bits: int = 5
    stream_tokens: int = 8
    grouped_from: int = 8
    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    product_warps: int = 4
    stages: int = 3
    scratch_bytes: int = 256 << 20


def shape_name(geometry: Geometry) -> str:
    """``"HxI"``, hidden and inner size of an expert: the key of ``tuned.json``."""
    return f"{geometry.gate_up.cols}x{geometry.down.cols}"


def blocks_for(geometry: Geometry) -> Blocks:
    """What the table has for these shapes, else the defaults of :class:`Blocks`."""
    found = _table().get(shape_name(geometry), {})
    known = {field.name for field in fields(Blocks)}
    values = {name: value for name, value in found.items() if name in known}
    if "words" in values:
        values["words"] = tuple(values["words"])
    return Blocks(**values)


@cache
def _table() -> dict[str, dict]:
    return json.loads((Path(__file__).parent / "tuned.json").read_text())["shapes"]

"""Makes an artifact of Qwen1.5-MoE-A2.7B's expert shapes with random weights, without quantizing anything.

python experiments/soak/random_model.py OUT [--layers 4] [--experts 60] [--vocab 4096] [--seed 0] [--fallback]

Codes are random words, every LUT holds the quantiles of a normal distribution, so the planes are nested as real ones
are. Four layers of sixty experts take about 2 GB on the disk and half a minute; with the 16-bit ``--fallback``, other
random numbers, 6 GB. There is no tokenizer; the vocabulary is cut, since embeddings are not what is paged.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from scipy.stats import norm

from pallas_kernels.pages import Geometry, choose_page_words
from pwjax.checkpoints.manifest import block_shapes, geometry_for
from pwjax.checkpoints.tree import dense_shapes
from pwjax.checkpoints.writer import ArtifactWriter
from pwjax.config import ModelConfig
from pwjax.presets import preset

WIDTHS = (2, 3, 4, 5, 6)
LUT_ROWS = (4, 4)


def lut_pages(geometry: Geometry, matrix: int, bits: int, scale: float) -> np.ndarray:
    """Pages of one LUT, the same centroids for every group: uint32[pages, page_words]."""
    layout, shape = geometry.lut_layout(matrix, bits), geometry.shape(matrix)
    centroids = norm.ppf((np.arange(1 << bits) + 0.5) / (1 << bits)) * scale
    head = np.ones(2 * shape.scale_words, np.float16)
    row = np.concatenate([head, centroids.astype(np.float16)]).view("<u4")
    pages = np.zeros((layout.pages, geometry.page_words), "<u4")
    for group in range(shape.groups):
        page, at = divmod(group, layout.rows_per_page)
        pages[page, at * len(row) : (at + 1) * len(row)] = row
    return pages


def dense_pages(geometry: Geometry, matrix: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    """Pages of random 16-bit rows: uint32[pages, page_words]."""
    layout = geometry.dense_layout(matrix)
    values = rng.standard_normal((layout.pages, 2 * geometry.page_words), np.float32) * np.float32(scale)
    return values.astype(ml_dtypes.bfloat16).view("<u4")


def block_pages(
    geometry: Geometry, matrix: int, luts: list[np.ndarray], scale: float, rng: np.random.Generator
) -> np.ndarray:
    """All host pages of a random block."""
    planes = geometry.parent * geometry.plane_layout(matrix).pages
    codes = rng.integers(0, 2**32, (planes, geometry.page_words), "<u4")
    return np.concatenate([codes, *luts, *([dense_pages(geometry, matrix, scale, rng)] if geometry.fallback else [])])


def make(out: Path, config: ModelConfig, seed: int = 0, fallback: bool = False) -> Path:
    """Write the artifact."""
    rng = np.random.default_rng(seed)
    kv_row_words = config.kv_row_words(2)
    shapes = geometry_for(config, LUT_ROWS, 1 << 16, WIDTHS, fallback)
    page_words = choose_page_words(shapes.gate_up, shapes.down, WIDTHS, fallback, kv_row_words)
    geometry = geometry_for(config, LUT_ROWS, page_words, WIDTHS, fallback)
    scales = [cols**-0.5 for _, cols in block_shapes(config)]
    luts = [[lut_pages(geometry, m, b, scales[m]) for b in WIDTHS] for m in (0, 1)]
    with ArtifactWriter(out, config, f"random-{seed}") as writer:
        writer.begin(geometry)
        for layer in range(config.num_layers):
            with writer.layer(layer) as file:
                for _ in range(config.num_experts):
                    for matrix in (0, 1):
                        file.add(block_pages(geometry, matrix, luts[matrix], scales[matrix], rng))
        dense = {}
        for name, shape in dense_shapes(config).items():
            value = 1 if name.endswith("norm/scale") else rng.normal(0, shape[-1] ** -0.5, shape)
            dense[name] = np.broadcast_to(value, shape).astype(ml_dtypes.bfloat16)
        blocks = config.blocks
        error = np.array([0.0 if b == 16 else 4.0 ** -(b - 2) for b in geometry.all_bits])
        damage = rng.lognormal(0, 1, (blocks, 1)) * error
        mass = rng.dirichlet(np.full(config.num_experts, 2.0), config.num_layers)
        summary = {"damage": ["paper"], "how": "random numbers"}
        return writer.finish(dense, {"damage/paper": damage, "routing_mass": mass}, summary, {})


def qwen_shape(layers: int = 4, experts: int = 60, vocab: int = 4096) -> ModelConfig:
    """Qwen1.5-MoE-A2.7B with fewer layers and a smaller vocabulary, and no end-of-sequence token."""
    return replace(
        preset("qwen1.5-moe-a2.7b"), num_layers=layers, num_experts=experts, vocab_size=vocab, eos_token_ids=()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fallback", action="store_true", help="with 16-bit rows")
    args = parser.parse_args()
    make(args.out, qwen_shape(args.layers, args.experts, args.vocab), args.seed, args.fallback)


if __name__ == "__main__":
    main()

"""Import a pack of ``any-precision-llm`` into an artifact: the same weights at every width, no calibration anew."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from calib.anyprecision import dequantize, weighted_energy, weighted_errors
from pallas_kernels.bitplanes import block_pages
from pallas_kernels.pages import BlockShape, Geometry, choose_page_words
from pwjax.block_writing import MadeBlock, write_layers
from pwjax.checkpoints import manifest as manifests
from pwjax.checkpoints.any_precision import AnyPrecisionPack
from pwjax.checkpoints.hf import HFCheckpoint
from pwjax.checkpoints.inputs import tokenizer_files
from pwjax.checkpoints.lazy import bf16
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tree import EXPERTS
from pwjax.checkpoints.writer import ArtifactWriter, refuse_taken
from pwjax.errors import CheckpointError, UsageError
from pwjax.progress import Progress, silent

ALGORITHM = "any-precision-llm pack/1"


def import_pack(
    pack: str | os.PathLike,
    out: str | os.PathLike,
    *,
    original: str | os.PathLike | None = None,
    progress: Progress = silent,
) -> Path:
    """Write the pack directory ``pack`` as the artifact ``out`` and return its path.

    Experts keep their codes and tables bit by bit (one table a row, scales 1). ``original``: the Hugging Face directory
    that was quantized; the artifact then has 16 bits, the dense weights are the original ones, and damage is measured
    against them. Without it there are no 16 bits, matrices outside of the experts that the pack quantized are
    dequantized at its widest precision, and damage is measured against that.

    Interrupted work resumes at the last finished layer. Raises CheckpointError, ArtifactError or UsageError with one
    sentence. ``progress(stage, done, total)``.
    """
    refuse_taken(Path(out))
    source = AnyPrecisionPack(pack)
    config, widths = source.config, source.widths
    first = None if original is None else HFCheckpoint(original)
    if first is not None and replace(first.config, eos_token_ids=config.eos_token_ids) != config:
        raise CheckpointError(f"{original} is another model than the pack at {pack}: their config.json differ")
    exact = None if first is None else first.source()
    fallback = exact is not None
    shapes = [BlockShape(*shape, 1) for shape in manifests.block_shapes(config)]
    try:
        words = choose_page_words(shapes[0], shapes[1], widths, fallback, config.kv_row_words(2))
    except ValueError as error:
        raise UsageError(f"this model cannot be imported: {error}") from error
    geometry = Geometry(words, widths, fallback, *shapes)
    extra = tokenizer_files(source.path if (source.path / "tokenizer.json").exists() else None)
    dense = source.dense() if exact is None else {n: v for n, v in exact.flat.items() if n not in EXPERTS}
    with ArtifactWriter(out, config, _key(source, first, geometry)) as writer:
        writer.begin(geometry, sum(a.nbytes for a in dense.values()) + sum(map(len, extra.values())))
        records = write_layers(writer, partial(_blocks, source, exact, geometry), "importing", progress)
        mass = np.full((config.num_layers, config.num_experts), 1 / config.num_experts)
        tables = {
            "damage/unweighted": np.array([row for record in records for row in record["damage"]], np.float64),
            "routing_mass": mass,
        }
        against = "the original weights" if fallback else f"the pack's own weights at {widths[-1]} bits"
        summary = {
            "damage": ["unweighted"],
            "importance": f"none: squared error against {against}, every weight counted once",
            "routing_mass": "uniform: packs have none",
            "windows": 0,
            "unrouted": [],
            "report": [row for record in records for row in record["report"]],
        }
        more = {"codes": ALGORITHM, "inputs_sha256": (writer.state / "key").read_text()}
        return writer.finish(dense, tables, summary, extra, more)


def _blocks(source: AnyPrecisionPack, exact: ParamSource | None, geometry: Geometry, layer: int) -> Iterator[MadeBlock]:
    """The blocks of a layer in file order; their errors are against ``exact``, None: the pack's widest precision."""
    weights = None if exact is None else [bf16(exact.flat[name][layer]) for name in EXPERTS]
    for expert in range(source.config.num_experts):
        for matrix in (0, 1):
            weight, block = None if weights is None else weights[matrix][expert], source.block(layer, expert, matrix)
            reference = dequantize(block, geometry.parent) if weight is None else weight.astype(np.float32)
            error = np.minimum.accumulate(weighted_errors(reference, (None,), block, geometry.widths)[0])
            damage = np.append(error, [0.0] * geometry.fallback)
            pages = block_pages(block, weight, geometry, matrix)
            yield MadeBlock(matrix, pages, damage, error, weighted_energy(reference, None))


def _key(source: AnyPrecisionPack, original: HFCheckpoint | None, geometry: Geometry) -> str:
    """Hash of everything that the artifact's bytes depend on."""
    facts = {
        "algorithm": ALGORITHM,
        "schema": manifests.SCHEMA,
        "config": source.config.to_json(),
        "geometry": geometry.to_json(),
        "files": [manifests.file_sha256(file) for file in source.files],
        "original": None if original is None else [manifests.file_sha256(file) for file in original.files],
    }
    return hashlib.sha256(manifests.dumps(facts)).hexdigest()

"""The artifact's manifest: what is in the directory, how its bytes are laid out, and what it was made from.

It holds no times, host names or paths, so that equal inputs give equal bytes.
"""

import hashlib
import json
from pathlib import Path

from pallas_kernels.pages import MATRICES, BlockShape, Geometry
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError, CheckpointError

FORMAT = "pwjax-artifact"
SCHEMA = 1
NAME = "manifest.json"
DENSE = "dense.safetensors"
TABLES = "calibration/tables.safetensors"
PAGES = "pages"
# The manifest's key for the sha256 of all the rest of it.
SEAL = "manifest_sha256"

# What a reader of another language needs to know about the bytes.
LAYOUT = {
    "byte_order": "little",
    "planes": "uint32 rows, plane 0 is the code's most significant bit; bit c (LSB = 0) of word w is column 32*w+c",
    "lut": "per group float16 row scales padded to a word, then 2^b float16 centroids, any order",
    "weight": "scale[row] * lut[group][code >> (parent - b)], float32",
    "fallback": "bfloat16 rows, column 2i in the low half of word i",
    "block": "planes, then the LUT of each width ascending, then the 16-bit rows; every part starts a page",
    "file": "expert by expert, gate_up then down",
    "crc32": "zlib.crc32 of each page, uint32",
}


def block_shapes(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, cols) of ``gate_up`` and ``down`` of one expert."""
    return (2 * config.expert_size, config.hidden_size), (config.hidden_size, config.expert_size)


def describe(config: ModelConfig, geometry: Geometry) -> dict:
    """The part of the manifest that follows from the model and its geometry."""
    matrices = [
        {
            "name": MATRICES[m],
            "params": geometry.shape(m).params,
            "host_pages": geometry.host_block_pages(m),
            "pages": {str(b): geometry.block_pages(m, b) for b in geometry.all_bits},
        }
        for m in (0, 1)
    ]
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "config": config.to_json(),
        "geometry": geometry.to_json(),
        "bits": list(geometry.all_bits),
        "layout": LAYOUT,
        "blocks": {
            "index": "(layer * experts + expert) * 2 + matrix",
            "layers": config.num_layers,
            "experts": config.num_experts,
            "count": config.blocks,
            "matrices": matrices,
            "layer_pages": geometry.host_layer_pages(config.num_experts),
        },
    }


def read(path: Path) -> tuple[dict, ModelConfig, Geometry]:
    """Read and check ``manifest.json`` of an artifact directory; ArtifactError says what is wrong with it."""
    file = path / NAME
    if not path.is_dir():
        raise ArtifactError(f"there is no quantized model at {path}; make one with `pwjax quantize`")
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{path} is not a quantized model: it has no {NAME}; make one with `pwjax quantize`"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(f"{file} is not the manifest of a quantized model")
    if manifest.get("schema") != SCHEMA:
        raise ArtifactError(
            f"{path} was written with schema {manifest.get('schema')}, this version reads {SCHEMA}: quantize anew"
        )
    # Artifacts of before this key lack it.
    if SEAL in manifest and manifest[SEAL] != _digest(manifest):
        raise ArtifactError(f"{file} is damaged: it was changed after it was written; quantize anew, or copy it again")
    try:
        config = ModelConfig.from_json(manifest["config"])
        geometry = Geometry.from_json(manifest["geometry"])
        files, calibration = manifest["files"], manifest["calibration"]
        sizes = [(int(f["bytes"]), len(f["sha256"])) for f in files.values()]
        calibration["damage"]
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise ArtifactError(f"{file} is damaged: {type(error).__name__} {error}") from error
    for m, (rows, cols) in enumerate(block_shapes(config)):
        shape = geometry.shape(m)
        if (shape.rows, shape.cols) != (rows, cols):
            raise ArtifactError(
                f"{file} is damaged: {MATRICES[m]} is {shape.rows}x{shape.cols}, the model has {rows}x{cols}"
            )
    if any(size < 0 or digest != 64 for size, digest in sizes):
        raise ArtifactError(f"{file} is damaged: file sizes or sha256 sums are not valid")
    return manifest, config, geometry


def geometry_for(
    config: ModelConfig, lut_rows: tuple[int, int], page_words: int, widths: tuple[int, ...], fallback: bool
) -> Geometry:
    """Geometry of a model's blocks."""
    shapes = [BlockShape(*shape, rows) for shape, rows in zip(block_shapes(config), lut_rows, strict=True)]
    return Geometry(page_words, widths, fallback, *shapes)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dumps(data: dict) -> bytes:
    """JSON with one possible spelling: sorted keys, indented, a final newline."""
    return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def sealed(manifest: dict) -> bytes:
    """The bytes of ``manifest``, with the sha256 of what it says in it."""
    return dumps({**manifest, SEAL: _digest(manifest)})


def _digest(manifest: dict) -> str:
    return hashlib.sha256(dumps({name: value for name, value in manifest.items() if name != SEAL})).hexdigest()

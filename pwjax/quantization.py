"""Quantize a model into an artifact: calibrate, choose LUT groups and page size, then layer by layer."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib.anyprecision import quantize_block, weighted_energy, weighted_errors
from calib.lut_groups import choose_lut_rows
from calib.refine import refine_block
from pallas_kernels.bitplanes import block_pages
from pallas_kernels.pages import MATRICES, Geometry
from pwjax.block_writing import MadeBlock, write_layers
from pwjax.calibration import ALGORITHM as CALIBRATION
from pwjax.calibration import Calibrated, Calibration, operating_points
from pwjax.calibration_needs import disk_bytes, needs
from pwjax.calibration_text import SEQUENCE_LENGTH, TOKENS, CalibrationText, Text, calibration_text
from pwjax.checkpoints import manifest as manifests
from pwjax.checkpoints.inputs import checked_params, tokenizer_files
from pwjax.checkpoints.lazy import LayerStack, bf16
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tree import EXPERTS
from pwjax.checkpoints.writer import ArtifactWriter, refuse_taken
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError, UsageError
from pwjax.progress import Progress, silent
from pwjax.streamed import CodedExperts

# Part of the key of a partial conversion: raise it when the same inputs would give other bytes.
ALGORITHM = "any-precision/3"

# Additions up to which tables are refined unless asked otherwise: some minutes of one core.
REFINE_WORK = 10**11

# What a weight counts in the error that codes minimize.
MOMENTS = "mean gate^2 times squared input of the routed tokens, a number a column"
UNIFORM = "every weight counts once"

# Blocks of each matrix that the choice of LUT groups looks at.
SAMPLES = 4


@dataclass(frozen=True)
class Settings:
    """How to quantize; UsageError for values that cannot be.

    ``widths`` contiguous within 2..8, ``fallback`` keeps 16-bit pages, ``lut_rows`` (gate_up, down) or None to choose,
    ``page_words`` or None to choose, ``refine`` tables by the second moment of their inputs.
    """

    widths: tuple[int, ...]
    fallback: bool
    lut_rows: tuple[int, int] | None
    page_words: int | None
    refine: bool

    @classmethod
    def make(
        cls, config: ModelConfig, bits, fallback: bool, lut_rows, page_words: int | None, refine: bool
    ) -> "Settings":
        """Settings from what a caller may write: ``bits`` "2-6" or numbers, ``lut_rows`` "auto", one or two numbers."""
        if isinstance(lut_rows, str):
            if lut_rows != "auto":
                raise UsageError(f'lut_rows must be "auto", a number or a pair of numbers, got {lut_rows!r}')
            groups = None
        else:
            groups = tuple(lut_rows) if isinstance(lut_rows, tuple | list) else (lut_rows, lut_rows)
            if len(groups) != 2 or not all(isinstance(g, int) for g in groups):
                raise UsageError(f'lut_rows must be "auto", a number or a pair of numbers, got {lut_rows!r}')
            shapes = manifests.block_shapes(config)
            for name, group, (rows, _) in zip(MATRICES, groups, shapes, strict=True):
                if group < 1 or rows % group:
                    raise UsageError(f"lut_rows = {group} does not divide the {rows} rows of {name}")
        return cls(parse_bits(bits), bool(fallback), groups, page_words, refine)


def parse_bits(bits: str | int | range | tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Widths from ``"2-6"``, ``"4"`` or a sequence; UsageError unless contiguous, ascending and within 2..8."""
    widths: tuple[int, ...] = ()
    try:
        if isinstance(bits, str):
            low, dash, high = bits.partition("-")
            widths = tuple(range(int(low), int(high if dash else low) + 1))
        else:
            widths = (bits,) if isinstance(bits, int) else tuple(int(b) for b in bits)
    except (TypeError, ValueError):
        pass
    if not widths or widths != tuple(range(widths[0], widths[-1] + 1)) or widths[0] < 2 or widths[-1] > 8:
        raise UsageError(f"bits must be a contiguous range within 2-8, such as 2-6, got {bits!r}")
    return widths


def quantize(
    params: Mapping[str, Any] | str | os.PathLike,
    config: ModelConfig,
    out: str | os.PathLike,
    *,
    text: Text | None = None,
    tokenizer: Any = None,
    bits: str | range | tuple[int, ...] = (2, 3, 4, 5, 6),
    fallback: bool = True,
    lut_rows: str | int | tuple[int, int] = "auto",
    page_words: int | None = None,
    refine: bool | None = None,
    tokens: int = TOKENS,
    sequence_length: int = SEQUENCE_LENGTH,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    jobs: int = 1,
    progress: Progress = silent,
    note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Quantize ``params`` into the artifact directory ``out`` and return its path.

    ``params``: the parameter tree (arrays of NumPy or JAX, any float type; stored as bfloat16), variables or a train
    state that holds it under ``params``, or an Orbax directory. ``text``: calibration text or token ids, up to
    ``tokens`` of them in sequences of ``sequence_length``, its sources mixed by ``weights`` (see
    :func:`pwjax.calibration_text.calibration_text`); without it every weight counts the same. ``seed``: of the tokens
    that the model draws in calibration. ``refine`` tables by least squares on the text's inputs (None: where it takes
    REFINE_WORK additions at most). ``tokenizer``: needed for text, and copied with its sibling files. ``jobs``:
    threads, 0 for one a core; the bytes do not depend on it. ``progress(stage, done, total)``;
    ``note`` is told beforehand how much memory and disk calibration takes at most.

    Interrupted work resumes at the last finished layer when called again with the same arguments. Raises UsageError,
    CheckpointError or ArtifactError with one sentence.
    """
    refuse_taken(Path(out))
    if refine and text is None:
        raise UsageError("tables are refined by the inputs that a calibration text makes: give text as well")
    refine = text is not None and (refine_work(config) <= REFINE_WORK if refine is None else refine)
    settings = Settings.make(config, bits, fallback, lut_rows, page_words, refine)
    extra_files = tokenizer_files(tokenizer)
    flat = checked_params(params, config)
    made = None if text is None else calibration_text(text, config, tokenizer, tokens, sequence_length, weights, seed)
    with ArtifactWriter(out, config, _key(flat, config, settings, made, extra_files)) as writer:
        # Before hours of work: the planes alone, the fallback, and what calibration keeps.
        least = config.expert_params * (settings.widths[-1] / 8 + 2 * fallback)
        least += 0 if made is None else disk_bytes(config, made, settings.widths, True, refine)
        if not any(writer.scratch.iterdir()):
            writer.reserve(int(least))
        calibration = None
        if made is not None:
            note(needs(config, made, settings.widths, True, refine))
            with writer.disk("calibration results"):
                calibration = Calibration(ParamSource(config, flat), made, writer.scratch, progress)
                calibration.run_original(refine=refine)
        geometry, choice = _choose_geometry(flat, config, settings, calibration)
        dense = {n: v if isinstance(v, LayerStack) else bf16(v) for n, v in flat.items() if n not in EXPERTS}
        writer.begin(geometry, sum(a.nbytes for a in dense.values()) + sum(map(len, extra_files.values())))
        records = _write_layers(writer, flat, geometry, calibration, jobs, progress)
        squared = np.array([row for record in records for row in record["damage"]], np.float64)
        with writer.disk("calibration results"):
            done = _finish_calibration(calibration, writer, geometry, squared)
        summary = {
            **done.summary,
            "quantizer": {
                "weights": UNIFORM if calibration is None else MOMENTS,
                "refined_blocks": sum(record["refined"] for record in records),
            },
            "lut_choice": choice,
            "report": [row for record in records for row in record["report"]],
        }
        more = {"codes": ALGORITHM, "inputs_sha256": (writer.state / "key").read_text()}
        return writer.finish(dense, done.tables, summary, extra_files, more)


def _finish_calibration(
    calibration: Calibration | None, writer: ArtifactWriter, geometry: Geometry, squared: np.ndarray
) -> Calibrated:
    """Tables and summary: of damage measured with the written codes; without text, of ``squared`` errors alone."""
    if calibration is not None:
        points = operating_points(geometry.widths)
        with CodedExperts(writer.body / manifests.PAGES, geometry, writer.config) as experts:
            for bits in points:
                calibration.run_point(bits, experts)
        return calibration.finish(squared, geometry.widths, points, geometry.fallback)
    config = writer.config
    damage = np.concatenate([squared, np.zeros((len(squared), 1))], axis=1) if geometry.fallback else squared
    mass = np.full((config.num_layers, config.num_experts), 1 / config.num_experts)
    summary = {
        "damage": ["unweighted"],
        "importance": "none: squared error of the weights, every weight counted once",
        "routing_mass": "uniform: no text was given",
        "windows": 0,
        "unrouted": [],
    }
    return Calibrated({"damage/unweighted": damage, "routing_mass": mass}, summary, {}, {})


def _write_layers(
    writer: ArtifactWriter,
    flat: dict,
    geometry: Geometry,
    calibration: Calibration | None,
    jobs: int,
    progress: Progress,
) -> list[dict]:
    """Quantize and write what an earlier run did not finish; returns the records of all layers."""
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:

        def blocks(layer: int) -> Iterator[MadeBlock]:
            # In order of blocks, whoever finishes first: the file does not depend on the number of threads.
            work = _layer_blocks(flat, layer, writer.config)
            return pool.map(lambda w: _quantize_one(*w, calibration, geometry), work)

        try:
            return write_layers(writer, blocks, "quantizing", progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _layer_blocks(flat: dict, layer: int, config: ModelConfig) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """``(layer, expert, matrix, weight bfloat16)`` of every block of a layer, in file order."""
    weights = [bf16(flat[name][layer]) for name in EXPERTS]
    for expert in range(config.num_experts):
        for matrix in (0, 1):
            yield layer, expert, matrix, weights[matrix][expert]


def _quantize_one(
    layer: int, expert: int, matrix: int, weight: np.ndarray, calibration: Calibration | None, geometry: Geometry
) -> MadeBlock:
    at, exact = (layer, expert, matrix), weight.astype(np.float32)
    worth = None if calibration is None else calibration.weights(*at)
    moment = None if calibration is None else calibration.second_moment(*at)
    try:
        block = quantize_block(exact, worth, geometry.widths, geometry.shape(matrix).lut_rows)
        if moment is not None:
            block = refine_block(block, exact, moment)
    except ValueError as error:
        name = f"layer {layer} expert {expert} {MATRICES[matrix]}"
        raise CheckpointError(f"{name} cannot be quantized: {error}") from error
    squares = None if calibration is None else calibration.squares(*at)
    error, squared = weighted_errors(exact, (worth, squares), block, geometry.widths)
    pages, energy = block_pages(block, weight, geometry, matrix), weighted_energy(exact, worth)
    return MadeBlock(matrix, pages, np.minimum.accumulate(squared), error, energy, moment is not None)


def refine_work(config: ModelConfig) -> int:
    """Additions that refining the tables of all blocks takes: N * K^2 for one of N rows and K columns."""
    return config.num_layers * config.num_experts * sum(n * k * k for n, k in manifests.block_shapes(config))


def _choose_geometry(
    flat: dict, config: ModelConfig, settings: Settings, calibration: Calibration | None
) -> tuple[Geometry, dict]:
    """LUT groups and page size, and the measured errors that decided, for the manifest."""
    shapes, fixed = manifests.block_shapes(config), settings.lut_rows
    total = config.num_layers * config.num_experts
    chosen = sorted({i * total // SAMPLES for i in range(SAMPLES)})
    samples = []
    for matrix, name in enumerate(EXPERTS):
        pairs = []
        for layer, expert in (divmod(i, config.num_experts) for i in chosen):
            own = None if calibration is None else calibration.weights(layer, expert, matrix)
            pairs.append((bf16(flat[name][layer][expert]).astype(np.float32), own))
        samples.append(pairs)
    candidates = None if fixed is None else ((fixed[0],), (fixed[1],))
    try:
        choice = choose_lut_rows(
            tuple(samples),
            shapes,
            settings.widths,
            settings.fallback,
            config.kv_row_words(2),
            candidates,
            settings.page_words,
        )
        geometry = manifests.geometry_for(
            config, choice.lut_rows, choice.page_words, settings.widths, settings.fallback
        )
    except ValueError as error:
        raise UsageError(f"this model cannot be quantized with these settings: {error}") from error
    errors = {
        MATRICES[m]: {str(group): {str(b): e for b, e in by_bits.items()} for group, by_bits in table.items()}
        for m, table in choice.errors.items()
    }
    return geometry, {"how": "given" if fixed else "least error at equal pages", "relative_error": errors}


def _key(flat: dict, config: ModelConfig, settings: Settings, text: CalibrationText | None, extra: Mapping) -> str:
    """Hash of everything that the artifact's bytes depend on."""
    facts = {
        "algorithm": ALGORITHM,
        "schema": manifests.SCHEMA,
        "config": config.to_json(),
        "widths": settings.widths,
        "fallback": settings.fallback,
        "lut_rows": settings.lut_rows,
        "page_words": settings.page_words,
        "refine": settings.refine,
        "calibration": None if text is None else [CALIBRATION, text.facts()],
        "extra": {name: hashlib.sha256(data).hexdigest() for name, data in extra.items()},
    }
    sha = hashlib.sha256(manifests.dumps(facts))
    for name, value in flat.items():
        sha.update(name.encode())
        for part in value:
            sha.update(np.ascontiguousarray(bf16(part)).view(np.uint16).astype("<u2", copy=False).data)
    return sha.hexdigest()

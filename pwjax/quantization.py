"""Quantize a model into an artifact: calibrate, choose LUT groups and page size, then layer by layer."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib import report
from calib.anyprecision import quantize_block, weighted_energy
from calib.lut_groups import choose_lut_rows
from calib.sensitivity import fill_unrouted, paper_damage
from pallas_kernels.bitplanes import block_pages
from pallas_kernels.pages import Geometry
from pwjax.calibration import NAMES, WINDOW_TOKENS, WINDOWS, Calibration, Text, token_windows
from pwjax.checkpoints import manifest as manifests
from pwjax.checkpoints.inputs import checked_params, tokenizer_files
from pwjax.checkpoints.lazy import LayerStack, bf16
from pwjax.checkpoints.tree import EXPERTS
from pwjax.checkpoints.writer import ArtifactWriter, refuse_taken
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError, UsageError
from pwjax.progress import Progress, silent

# Part of the key of a partial conversion: raise it when the same inputs would give other bytes.
ALGORITHM = "any-precision/2"

# Blocks of each matrix that the choice of LUT groups looks at.
SAMPLES = 4


@dataclass(frozen=True)
class Settings:
    """How to quantize; UsageError for values that cannot be.

    ``widths`` contiguous within 2..8, ``fallback`` keeps 16-bit pages, ``lut_rows`` (gate_up, down) or None to choose,
    ``page_words`` or None to choose.
    """

    widths: tuple[int, ...]
    fallback: bool
    lut_rows: tuple[int, int] | None
    page_words: int | None

    @classmethod
    def make(cls, config: ModelConfig, bits, fallback: bool, lut_rows, page_words: int | None) -> "Settings":
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
            for name, group, (rows, _) in zip(NAMES, groups, shapes, strict=True):
                if group < 1 or rows % group:
                    raise UsageError(f"lut_rows = {group} does not divide the {rows} rows of {name}")
        return cls(parse_bits(bits), bool(fallback), groups, page_words)


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
    windows: int = WINDOWS,
    window_tokens: int = WINDOW_TOKENS,
    jobs: int = 1,
    progress: Progress = silent,
) -> Path:
    """Quantize ``params`` into the artifact directory ``out`` and return its path.

    ``params``: the parameter tree (arrays of NumPy or JAX, any float type; stored as bfloat16), variables or a train
    state that holds it under ``params``, or an Orbax directory. ``text``: calibration text or token ids (see
    :func:`pwjax.calibration.token_windows`); without it every weight counts the same. ``tokenizer``: needed for text,
    and copied with its sibling files. ``jobs``: threads, 0 for one a core; the bytes do not depend on it.
    ``progress(stage, done, total)``.

    Interrupted work resumes at the last finished layer when called again with the same arguments. Raises UsageError,
    CheckpointError or ArtifactError with one sentence.
    """
    refuse_taken(Path(out))
    settings = Settings.make(config, bits, fallback, lut_rows, page_words)
    extra_files = tokenizer_files(tokenizer)
    flat = checked_params(params, config)
    tokens = None if text is None else token_windows(text, config, tokenizer, windows, window_tokens)
    with ArtifactWriter(out, config, _key(flat, config, settings, tokens, extra_files)) as writer:
        expert_params = config.expert_params
        # Before hours of work: the planes alone, the fallback, and the scratch copy of the gradients.
        least = expert_params * (settings.widths[-1] / 8 + 2 * fallback + (0 if tokens is None else 4))
        if not any(writer.scratch.iterdir()):
            writer.reserve(int(least))
        if tokens is None:
            calibration = Calibration.uniform(config)
        else:
            with writer.disk("calibration results"):
                calibration = Calibration.run(flat, config, tokens, writer.scratch, progress)
        geometry, choice = _choose_geometry(flat, config, settings, calibration)
        dense = {n: v if isinstance(v, LayerStack) else bf16(v) for n, v in flat.items() if n not in EXPERTS}
        writer.begin(geometry, sum(a.nbytes for a in dense.values()) + sum(map(len, extra_files.values())))
        _write_layers(writer, flat, geometry, calibration, jobs, progress)
        records = [record for _, record in sorted(writer.records().items())]
        damage = np.array([row for record in records for row in record["damage"]], np.float64)
        if fallback:
            damage = np.concatenate([damage, np.zeros((len(damage), 1))], axis=1)
        summary = {
            **calibration.summary,
            "unrouted": [name for record in records for name in record["unrouted"]],
            "lut_choice": choice,
            "report": [row for record in records for row in record["report"]],
        }
        tables = {f"damage/{summary['damage'][0]}": damage, "routing_mass": calibration.routing_mass}
        more = {"codes": ALGORITHM, "inputs_sha256": (writer.state / "key").read_text()}
        return writer.finish(dense, tables, summary, extra_files, more)


def _write_layers(
    writer: ArtifactWriter, flat: dict, geometry: Geometry, calibration: Calibration, jobs: int, progress: Progress
) -> None:
    """Quantize and write every layer that an earlier run did not finish."""
    config, done = writer.config, writer.records()
    per_layer, total = 2 * config.num_experts, config.blocks
    count = len(done) * per_layer
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        try:
            for layer in range(config.num_layers):
                if layer in done:
                    continue
                with writer.layer(layer) as file:
                    file.record = {"damage": [], "unrouted": [], "report": []}
                    error = {name: dict.fromkeys(geometry.widths, 0.0) for name in NAMES}
                    energy = {name: 0.0 for name in NAMES}
                    work = _layer_blocks(flat, layer, config, calibration, file.record["unrouted"])
                    # In order of blocks, whoever finishes first: the file does not depend on the number of threads.
                    for matrix, pages, damage, own in pool.map(lambda w: _quantize_one(w, geometry), work):
                        file.add(pages)
                        file.record["damage"].append(damage.tolist())
                        energy[NAMES[matrix]] += own
                        for bits, value in zip(geometry.widths, damage, strict=True):
                            error[NAMES[matrix]][bits] += float(value)
                        count += 1
                        progress("quantizing", count, total)
                    file.record["report"] = report.layer_rows(layer, error, energy)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _layer_blocks(flat: dict, layer: int, config: ModelConfig, calibration: Calibration, unrouted: list) -> Iterator:
    """``(name, matrix, weight bfloat16, importance)`` of every block of a layer, in file order."""
    weights = [bf16(flat[name][layer]) for name in EXPERTS]
    importance = []
    for matrix, name in enumerate(NAMES):
        own = calibration.importance(layer, matrix)
        if own is not None:
            own, empty = fill_unrouted(own)
            unrouted.extend(f"layer {layer} expert {expert} {name}" for expert in empty)
        importance.append(own)
    for expert in range(config.num_experts):
        for matrix in (0, 1):
            own = None if importance[matrix] is None else importance[matrix][expert]
            yield f"layer {layer} expert {expert} {NAMES[matrix]}", matrix, weights[matrix][expert], own


def _quantize_one(work: tuple, geometry: Geometry) -> tuple[int, np.ndarray, np.ndarray, float]:
    """Pages, damage at each width and weighted energy of one block."""
    name, matrix, weight, importance = work
    exact = weight.astype(np.float32)
    try:
        block = quantize_block(exact, importance, geometry.widths, geometry.shape(matrix).lut_rows)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be quantized: {error}") from error
    damage = paper_damage(exact, importance, block, geometry.widths)
    return matrix, block_pages(block, weight, geometry, matrix), damage, weighted_energy(exact, importance)


def _choose_geometry(
    flat: dict, config: ModelConfig, settings: Settings, calibration: Calibration
) -> tuple[Geometry, dict]:
    """LUT groups and page size, and the measured errors that decided, for the manifest."""
    shapes, fixed = manifests.block_shapes(config), settings.lut_rows
    total = config.num_layers * config.num_experts
    chosen = sorted({i * total // SAMPLES for i in range(SAMPLES)})
    samples = []
    for matrix, name in enumerate(EXPERTS):
        pairs = []
        for layer, expert in (divmod(i, config.num_experts) for i in chosen):
            importance = calibration.importance(layer, matrix)
            own = None if importance is None else fill_unrouted(importance)[0][expert]
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
        NAMES[m]: {str(group): {str(b): e for b, e in by_bits.items()} for group, by_bits in table.items()}
        for m, table in choice.errors.items()
    }
    return geometry, {"how": "given" if fixed else "least error at equal pages", "relative_error": errors}


def _key(flat: dict, config: ModelConfig, settings: Settings, tokens: np.ndarray | None, extra: Mapping) -> str:
    """Hash of everything that the artifact's bytes depend on."""
    facts = {
        "algorithm": ALGORITHM,
        "schema": manifests.SCHEMA,
        "config": config.to_json(),
        "widths": settings.widths,
        "fallback": settings.fallback,
        "lut_rows": settings.lut_rows,
        "page_words": settings.page_words,
        "windows": None if tokens is None else list(tokens.shape),
        "extra": {name: hashlib.sha256(data).hexdigest() for name, data in extra.items()},
    }
    sha = hashlib.sha256(manifests.dumps(facts))
    if tokens is not None:
        sha.update(tokens.astype("<i4").tobytes())
    for name, value in flat.items():
        sha.update(name.encode())
        for part in value:
            sha.update(np.ascontiguousarray(bf16(part)).view(np.uint16).astype("<u2", copy=False).data)
    return sha.hexdigest()

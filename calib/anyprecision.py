"""Any-Precision quantization of one expert matrix: nested codes, one float16 table a width, LUT groups.

``lut_rows = 1`` is Any-Precision: a table per output row over the raw weights, every scale exactly 1. With
``lut_rows = G`` the rows of a group are divided by their own float16 scale (their RMS) and share one table; the
importance is multiplied by the squared scale, so the weighted error stays that of the real weights.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calib.kmeans import nested_kmeans
from pallas_kernels.pages import BlockShape, Geometry, choose_page_words

# Elements handled at once: a few working arrays of this size stay in a core's cache.
CHUNK_ELEMENTS = 1 << 16

F16_MAX = float(np.finfo(np.float16).max)
F16_TINY = float(np.finfo(np.float16).smallest_subnormal)

# Rows of a sampled block that the choice of the LUT group looks at.
SAMPLE_ROWS = 256
MAX_LUT_ROWS = 64


@dataclass(frozen=True)
class QuantizedBlock:
    """One matrix at every width.

    ``codes`` uint8[N, K] at the parent width (the code at b bits is ``codes >> (parent - b)``), ``luts``
    {b: float16[N/G, 2**b]} ascending, ``scales`` float16[N].
    """

    codes: np.ndarray
    luts: dict[int, np.ndarray]
    scales: np.ndarray

    @cached_property
    def parent(self) -> int:
        """Width of the codes."""
        return max(self.luts)


def quantize_block(
    weight: np.ndarray, importance: np.ndarray | None, widths: tuple[int, ...], lut_rows: int = 1
) -> QuantizedBlock:
    """Quantize ``weight`` float32[N, K] (or bfloat16) with ``importance`` float32[N, K] >= 0, None for equal.

    ``widths`` are contiguous and ascending within 2..8, ``lut_rows`` divides N. The same inputs give the same bytes.
    ValueError, with a sentence, for values that are not finite, do not fit in float16, or do not match.
    """
    weight = np.asarray(weight, np.float32)
    _check(weight, importance, widths, lut_rows)
    rows, cols = weight.shape
    groups, parent = rows // lut_rows, widths[-1]
    scales = row_scales(weight, lut_rows)
    codes = np.empty((groups, lut_rows * cols), np.uint8)
    luts = {bits: np.empty((groups, 1 << bits), np.float16) for bits in widths}
    step = max(1, CHUNK_ELEMENTS // max(lut_rows * cols, 1024))
    for first in range(0, groups, step):
        take = slice(first, min(first + step, groups))
        of_rows = slice(take.start * lut_rows, take.stop * lut_rows)
        values, weights = weight[of_rows], None if importance is None else importance[of_rows]
        if lut_rows > 1:
            scale = scales[of_rows, None].astype(np.float32)
            values = values / scale
            weights = np.square(scale, dtype=np.float64) * (1.0 if weights is None else weights)
            weights = np.broadcast_to(weights, values.shape)
        shape = (take.stop - take.start, lut_rows * cols)
        weights = None if weights is None else np.reshape(weights, shape)
        codes[take], tables = nested_kmeans(values.reshape(shape), weights, widths[0], parent)
        for bits, table in tables.items():
            luts[bits][take] = table.astype(np.float16)
    return QuantizedBlock(codes.reshape(rows, cols), luts, scales)


def row_scales(weight: np.ndarray, lut_rows: int) -> np.ndarray:
    """Scales float16[N] of rows that share tables: their RMS, 1 for zero rows and wherever ``lut_rows`` is 1.

    ValueError where a scale or a weight is beyond float16.
    """
    if lut_rows == 1:
        rms = np.ones(len(weight))
        largest = float(np.abs(weight).max(initial=0))
    else:
        rms = np.sqrt(np.mean(np.square(weight, dtype=np.float64), axis=1))
        largest = float(rms.max(initial=0))
    if largest > F16_MAX:
        raise ValueError(f"weights of size {largest:.3g} do not fit in float16 (at most {F16_MAX:.0f}): rescale them")
    rms = np.where(rms > 0, np.maximum(rms, F16_TINY), 1.0)
    return rms.astype(np.float16)


def dequantize(block: QuantizedBlock, bits: int) -> np.ndarray:
    """Weights float32[N, K] of the block at ``bits``; KeyError where the block lacks that width."""
    lut = block.luts[bits].astype(np.float32)
    rows, cols = block.codes.shape
    codes = (block.codes >> (block.parent - bits)).reshape(len(lut), -1)
    index = codes + (np.arange(len(lut)) << bits)[:, None]
    return lut.ravel()[index].reshape(rows, cols) * block.scales.astype(np.float32)[:, None]


def weighted_error(weight: np.ndarray, importance: np.ndarray | None, block: QuantizedBlock, bits: int) -> float:
    """``sum h (W - W_b)^2`` in float64 over one matrix; ``importance`` None counts every weight once."""
    error = np.square(np.asarray(weight, np.float32) - dequantize(block, bits), dtype=np.float64)
    return float(error.sum() if importance is None else np.einsum("nk,nk->", error, importance, dtype=np.float64))


def lut_candidates(rows: int) -> tuple[int, ...]:
    """Powers of two up to 64 that divide ``rows``."""
    return tuple(1 << i for i in range(MAX_LUT_ROWS.bit_length()) if rows % (1 << i) == 0)


@dataclass(frozen=True)
class LutChoice:
    """What :func:`choose_lut_rows` settled on; ``errors`` are relative errors {matrix: {lut_rows: {bits: error}}}."""

    lut_rows: tuple[int, int]
    page_words: int
    errors: dict[int, dict[int, dict[int, float]]]


def choose_lut_rows(
    samples: tuple[Iterable[tuple[np.ndarray, np.ndarray | None]], ...],
    shapes: tuple[tuple[int, int], tuple[int, int]],
    widths: tuple[int, ...],
    fallback: bool,
    kv_row_words: int,
    candidates: tuple[tuple[int, ...], ...] | None = None,
    page_words: int | None = None,
) -> LutChoice:
    """The LUT group of each matrix with the least weighted error at equal bytes, and the page size that suits it.

    ``samples[m]`` are ``(weight, importance)`` pairs of matrix m, ``shapes[m]`` its (rows, cols). Bytes are counted in
    whole pages, and the page size follows the groups, so the choice is repeated until neither moves. Groups whose
    scales overflow are no candidates. ``candidates`` fixes the groups, ``page_words`` the page.
    """
    groups_of = candidates or tuple(lut_candidates(rows) for rows, _ in shapes)
    errors = {m: _sample_errors(samples[m], widths, groups_of[m]) for m in (0, 1)}
    blocks = lambda groups: [BlockShape(*shapes[m], groups[m]) for m in (0, 1)]  # noqa: E731
    chosen = tuple(min(errors[m], key=lambda g: abs(g - 4)) for m in (0, 1))
    seen: list[tuple[int, ...]] = []
    while True:
        words = page_words or choose_page_words(*blocks(chosen), widths, fallback, kv_row_words)
        if chosen in seen:
            return LutChoice((chosen[0], chosen[1]), words, errors)
        seen.append(chosen)
        chosen = tuple(
            best_curve(
                {
                    group: [
                        (Geometry(words, widths, fallback, *blocks(_with(chosen, m, group))).block_pages(m, b), error)
                        for b, error in by_bits.items()
                    ]
                    for group, by_bits in errors[m].items()
                }
            )
            for m in (0, 1)
        )


def _with(pair: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``pair`` with one entry replaced."""
    return tuple(value if i == index else old for i, old in enumerate(pair))


def best_curve(curves: dict[int, list[tuple[int, float]]]) -> int:
    """Key of the (pages, error) curve that lies lowest: mean log error over the pages that two curves share.

    Challengers are tried in order and must win, so the first of equals stays.
    """
    best, *challengers = curves
    for key in challengers:
        if _log_gap(curves[key], curves[best]) < 0:
            best = key
    return best


def _log_gap(left: list[tuple[int, float]], right: list[tuple[int, float]]) -> float:
    """Mean of log error of ``left`` minus ``right`` at equal pages; negative where left is better."""
    logs = [(np.array([p for p, _ in c], float), np.log([max(e, 1e-30) for _, e in c])) for c in (left, right)]
    low, high = max(p[0] for p, _ in logs), min(p[-1] for p, _ in logs)
    # Curves that do not overlap are compared where the dearer one begins: the cheaper one stays at its best.
    grid = np.linspace(low, max(low, high), 65)
    return float(np.mean(np.interp(grid, *logs[0]) - np.interp(grid, *logs[1])))


def _sample_errors(samples, widths, candidates) -> dict[int, dict[int, float]]:
    """Relative weighted error of every candidate group at every width, over the samples' first rows."""
    pairs = [(np.asarray(w, np.float32), h) for w, h in samples]
    errors = {}
    for group in candidates:
        total, energy = dict.fromkeys(widths, 0.0), 0.0
        try:
            for weight, importance in pairs:
                rows = min(len(weight), max(SAMPLE_ROWS // group, 1) * group)
                weight, importance = weight[:rows], None if importance is None else importance[:rows]
                block = quantize_block(weight, importance, widths, group)
                energy += weighted_energy(weight, importance)
                for bits in widths:
                    total[bits] += weighted_error(weight, importance, block, bits)
        except ValueError:
            if group == candidates[-1] and not errors:
                raise
            continue
        errors[group] = {bits: total[bits] / energy if energy > 0 else 0.0 for bits in widths}
    return errors


def weighted_energy(weight: np.ndarray, importance: np.ndarray | None) -> float:
    """``sum h W^2`` in float64, what relative errors are relative to."""
    square = np.square(np.asarray(weight, np.float32), dtype=np.float64)
    return float(square.sum() if importance is None else np.einsum("nk,nk->", square, importance, dtype=np.float64))


def _check(weight, importance, widths, lut_rows) -> None:
    if weight.ndim != 2 or not weight.size:
        raise ValueError(f"a block is a matrix [out, in] with at least one weight, got shape {weight.shape}")
    if tuple(widths) != tuple(range(widths[0], widths[-1] + 1)) or widths[0] < 2 or widths[-1] > 8:
        raise ValueError(f"widths must be a contiguous range within 2..8, got {tuple(widths)}")
    if lut_rows < 1 or weight.shape[0] % lut_rows:
        raise ValueError(f"lut_rows must divide the {weight.shape[0]} rows, got {lut_rows}")
    if not np.isfinite(weight).all():
        raise ValueError("weights must be finite, got NaN or infinity: check the checkpoint")
    if importance is None:
        return
    if importance.shape != weight.shape:
        raise ValueError(f"importance {importance.shape} and weight {weight.shape} must have one shape")
    if not math.isfinite(float(importance.sum(dtype=np.float64))) or float(importance.min()) < 0:
        raise ValueError("importance must be finite and not negative: check the calibration loss for NaN")

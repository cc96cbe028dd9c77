"""Any-Precision quantization of one expert matrix: nested codes, one float16 table a width, LUT groups.

``lut_rows = 1`` is Any-Precision: a table per output row over the raw weights, every scale exactly 1. With
``lut_rows = G`` the rows of a group are divided by their own float16 scale (their RMS) and share one table; the
importance is multiplied by the squared scale, so the weighted error stays that of the real weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calib.kmeans import nested_kmeans

# Elements handled at once: a few working arrays of this size stay in a core's cache.
CHUNK_ELEMENTS = 1 << 16

F16_MAX = float(np.finfo(np.float16).max)
F16_TINY = float(np.finfo(np.float16).smallest_subnormal)


@dataclass(frozen=True)
class QuantizedBlock:
    """One matrix at every width.

    ``codes`` uint8[N, K] at the parent width (the code at b bits is ``codes >> (parent - b)``), ``luts``
    {b: float16[N/G, 2**b]}, ascending as quantize_block makes them, ``scales`` float16[N].
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
    """Quantize ``weight`` float32[N, K] (or bfloat16) with ``importance`` >= 0, None for equal.

    ``importance`` is float32[N, K], such as squared gradients, or float32[K], such as the inputs' second moments.
    ``widths`` are contiguous and ascending within 2..8, ``lut_rows`` divides N. The same inputs give the same bytes.
    ValueError, with a sentence, for values that are not finite, do not fit in float16, or do not match.
    """
    weight = np.asarray(weight, np.float32)
    _check(weight, importance, widths, lut_rows)
    importance = _per_weight(importance, weight.shape)
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


def weighted_errors(
    weight: np.ndarray, importances: Sequence[np.ndarray | None], block: QuantizedBlock, widths: Sequence[int]
) -> np.ndarray:
    """``sum h (W - W_b)^2`` over one matrix for each importance at each width, float64[len(importances), B].

    Each is as in quantize_block."""
    errors, weight = np.empty((len(importances), len(widths))), np.asarray(weight, np.float32)
    for at, bits in enumerate(widths):
        squares = np.square(weight - dequantize(block, bits), dtype=np.float64)
        errors[:, at] = [_weighted_sum(squares, importance) for importance in importances]
    return errors


def weighted_error(weight: np.ndarray, importance: np.ndarray | None, block: QuantizedBlock, bits: int) -> float:
    """:func:`weighted_errors` of one importance at one width."""
    return float(weighted_errors(weight, (importance,), block, (bits,))[0, 0])


def weighted_energy(weight: np.ndarray, importance: np.ndarray | None) -> float:
    """``sum h W^2`` in float64, what relative errors are relative to."""
    return _weighted_sum(np.square(np.asarray(weight, np.float32), dtype=np.float64), importance)


def _weighted_sum(squares: np.ndarray, importance: np.ndarray | None) -> float:
    if importance is None:
        return float(squares.sum())
    return float(np.einsum("nk,nk->", squares, _per_weight(importance, squares.shape), dtype=np.float64))


def _per_weight(importance: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """As one number a weight; a view where there is one a column."""
    return None if importance is None else np.broadcast_to(importance, shape)


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
    if importance.shape not in (weight.shape, weight.shape[1:]):
        raise ValueError(
            f"importance must have the weight's shape {weight.shape} or a number a column, got {importance.shape}"
        )
    if not math.isfinite(float(importance.sum(dtype=np.float64))) or float(importance.min()) < 0:
        raise ValueError("importance must be finite and not negative: check the calibration loss for NaN")

"""Tables that answer to the inputs a matrix really gets: least squares with the codes fixed.

K-means sees each weight alone. The output's error is ``tr (W - W_b) H (W - W_b)^T`` with the second moment
``H = E[g^2 x x^T]`` of the inputs, in which errors of correlated columns cancel; given codes it is quadratic in a
table's entries (the first half of the alternation in GuidedQuant's LNQ).
"""

import numpy as np

from calib.anyprecision import F16_MAX, QuantizedBlock

# Pulls the entry of a code that no weight has to where it was, and is next to nothing for all others.
_ANCHOR = 1e-9


def refine_block(
    block: QuantizedBlock,
    weight: np.ndarray,
    moment: np.ndarray,
    widths: tuple[int, ...] | None = None,
    ridge: float = 0.01,
) -> QuantizedBlock:
    """``block`` with the least-squares tables of ``widths`` (None: all); codes and scales stay.

    ``weight`` float32[N, K]; ``moment`` float64[K, K] is H, ``ridge`` times its mean diagonal is added to the diagonal
    against chance correlations of few tokens. Tables need not ascend. A width takes N * K^2 * 2^b multiplications.
    ValueError where shapes disagree, the moment is not finite, or a table does not fit in float16.
    """
    rows, cols = weight.shape
    if block.codes.shape != (rows, cols) or moment.shape != (cols, cols):
        raise ValueError(
            f"codes {block.codes.shape} and moment {moment.shape} do not belong to a weight of {(rows, cols)}"
        )
    if not np.isfinite(moment).all():
        raise ValueError("the inputs' second moment must be finite: check the calibration for NaN")
    h = moment + ridge * np.trace(moment) / cols * np.eye(cols)
    tables = {b: _table(block, weight, h, b) for b in widths or tuple(block.luts)}
    return QuantizedBlock(block.codes, {**block.luts, **tables}, block.scales)


def _table(block: QuantizedBlock, weight: np.ndarray, h: np.ndarray, bits: int) -> np.ndarray:
    """Table float16[N/G, 2**bits] of one width."""
    count, old = 1 << bits, block.luts[bits].astype(np.float64)
    group = len(weight) // len(old)
    left, right = np.zeros((len(old), count, count)), np.zeros((len(old), count))
    for row, (codes, scale) in enumerate(zip(block.codes >> (block.parent - bits), block.scales, strict=True)):
        picks = float(scale) * (codes[:, None] == np.arange(count))
        pushed = picks.T @ h
        left[row // group] += pushed @ picks
        right[row // group] += pushed @ weight[row].astype(np.float64)
    anchor = _ANCHOR * np.trace(left, axis1=1, axis2=2)[:, None] / count
    anchor = np.where(anchor > 0, anchor, 1.0)  # a moment of zeros says nothing: the table stays
    table = np.linalg.solve(left + anchor[..., None] * np.eye(count), (right + anchor * old)[..., None])[..., 0]
    largest = float(np.abs(table).max())
    if largest > F16_MAX:
        raise ValueError(f"a refined table of size {largest:.3g} does not fit in float16 (at most {F16_MAX:.0f})")
    return table.astype(np.float16)

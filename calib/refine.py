"""Tables that answer to the inputs a matrix really gets: least squares with the codes fixed.

K-means sees each weight alone. The output's error is ``tr (W - W_b) H (W - W_b)^T`` with the second moment
``H = E[g^2 x x^T]`` of the inputs, in which errors of correlated columns cancel; given codes it is quadratic in a
table's entries (the first half of the alternation in GuidedQuant's LNQ).
"""

import numpy as np

from calib.anyprecision import F16_MAX, QuantizedBlock
from calib.damage import PSEUDO_TOKENS

# Pulls the entry of a code that no weight has to where it was, and is next to nothing for all others.
_ANCHOR = 1e-9


def shrunk(moment: np.ndarray, tokens: int) -> np.ndarray:
    """The second moment float64[K, K] of ``tokens`` drawn to its own diagonal, as if PSEUDO_TOKENS more had shown
    uncorrelated inputs: correlations of few tokens are chance."""
    moment = np.asarray(moment, np.float64)
    out = moment * (tokens / (tokens + PSEUDO_TOKENS))
    np.fill_diagonal(out, np.diagonal(moment))
    return out


def refine_block(
    block: QuantizedBlock,
    weight: np.ndarray,
    moment: np.ndarray,
    widths: tuple[int, ...] | None = None,
    ridge: float = 0.01,
) -> QuantizedBlock:
    """``block`` with the least-squares tables of ``widths`` (None: all); codes and scales stay.

    ``weight`` float32[N, K]; ``moment`` float64[K, K] is H, ``ridge`` times its mean diagonal is added to the diagonal
    against chance correlations of few tokens. Tables need not ascend; one that does not fit in float16 stays as it was.
    All widths together take N * K^2 additions. ValueError where shapes disagree or the moment is not finite.
    """
    rows, cols = weight.shape
    if block.codes.shape != (rows, cols) or moment.shape != (cols, cols):
        raise ValueError(
            f"codes {block.codes.shape} and moment {moment.shape} do not belong to a weight of {(rows, cols)}"
        )
    if not np.isfinite(moment).all():
        raise ValueError("the inputs' second moment must be finite: check the calibration for NaN")
    h = moment + ridge * np.trace(moment) / cols * np.eye(cols)
    luts = {b: table.copy() if b in (widths or block.luts) else table for b, table in block.luts.items()}
    group = rows // len(luts[block.parent])
    for index in range(rows // group):
        take = slice(index * group, (index + 1) * group)
        left, right = _normal(block.codes[take], block.scales[take], weight[take], h, 1 << block.parent)
        for b in widths or luts:
            # A code at b bits stands for neighbouring codes of the parent width, so its equations are their sums.
            count, each = 1 << b, 1 << (block.parent - b)
            own = left.reshape(count, each, count, each).sum((1, 3)), right.reshape(count, each).sum(1)
            table = _solved(*own, luts[b][index].astype(np.float64))
            if np.abs(table).max() <= F16_MAX:
                luts[b][index] = table.astype(np.float16)
    return QuantizedBlock(block.codes, luts, block.scales)


def _normal(codes: np.ndarray, scales: np.ndarray, weight: np.ndarray, h: np.ndarray, count: int):
    """Normal equations (float64[count, count], float64[count]) of the table that some rows share."""
    left, right = np.zeros((count, count)), np.zeros(count)
    for own, scale, values in zip(codes, scales.astype(np.float64), weight.astype(np.float64), strict=True):
        order = np.argsort(own, kind="stable")
        used, first = np.unique(own[order], return_index=True)
        pushed = scale * np.stack([h[columns].sum(0) for columns in np.split(order, first[1:])])
        left[np.ix_(used, used)] += scale * np.add.reduceat(pushed[:, order], first, axis=1)
        right[used] += pushed @ values
    return left, right


def _solved(left: np.ndarray, right: np.ndarray, old: np.ndarray) -> np.ndarray:
    anchor = _ANCHOR * np.trace(left) / len(old) or 1.0  # a moment of zeros says nothing: the table stays
    return np.linalg.solve(left + anchor * np.eye(len(old)), right + anchor * old)

"""What the weights of an expert matrix are worth: by their inputs, which codes are made by, and by their squared
gradients (equation 2 of the paper)."""

import numpy as np

from calib.anyprecision import QuantizedBlock, weighted_errors
from calib.damage import PSEUDO_TOKENS


def column_weights(moments: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Worth float64[E, K] of the weights in each column: ``E[g^2 x^2]`` over routed tokens, which is the mean square of
    what an error of 1 does to the expert's weighted output.

    ``moments`` float64[E, K] are sums over the ``tokens`` int64[E] of each expert of a layer. An expert is drawn to the
    layer's mean as if it had PSEUDO_TOKENS of that, so one without tokens has the mean; all 1 in a layer of zeros.
    """
    pooled = moments.sum(0) / max(int(tokens.sum()), 1)
    if not pooled.any():
        return np.ones_like(moments)
    return (moments + PSEUDO_TOKENS * pooled) / (tokens[:, None] + PSEUDO_TOKENS)


def unrouted_importance(means: np.ndarray) -> np.ndarray:
    """Importance float64[E] of every weight of experts that have none: the least mean that an expert of the layer has.

    ``means`` float64[E] are mean importances of one layer and matrix. An expert that no calibration token chose must
    not look free of damage; without any signal in the layer all weights count 1.
    """
    known = means[means > 0]
    return np.where(means > 0, means, known.min() if known.size else 1.0)


def paper_damage(
    weight: np.ndarray, importance: np.ndarray | None, block: QuantizedBlock, widths: tuple[int, ...]
) -> np.ndarray:
    """Damage float64[B] of a block at each width, ``sum h (W - W_b)^2``; None counts every weight once.

    With ``h`` from :mod:`calib.blocks`, half of it is nats a token. Rounding of tables to float16 may let a wider width
    lose by a hair; the running minimum is returned.
    """
    return np.minimum.accumulate(weighted_errors(weight, (importance,), block, widths)[0])

"""What an expert matrix loses at each width by the squared gradients of its weights (equation 2 of the paper)."""

import numpy as np

from calib.anyprecision import QuantizedBlock, weighted_error


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
    return np.minimum.accumulate([weighted_error(weight, importance, block, bits) for bits in widths])

"""Prices: the damage that a plan is made with, calibration joined by the routing and the prompts of the moment.

The three layers of the paper, each a factor::

    sensitivity   BlockTable.expected          what calibration measured, per served token
    routing       BlockTable.routing_shift     how much more an expert is used now; shrunk to calibration
                  TextKinds.conditional        what its tokens then lose: those of the texts that routing looks like
    residual      ResidualHeads.factor         how much more these prompts hurt
"""

from dataclasses import dataclass

import numpy as np

from planner.tables import BlockTable, shares

# Choices of an average expert that calibration's routing counts for against the running one.
PSEUDO_CHOICES = 16.0


@dataclass(frozen=True, eq=False)
class Prices:
    """``damage`` float64[n, B] a served token, and what it was made of.

    ``routing`` float64[n] and ``residual`` float64[n, B-1] are factors; ``mixture`` float64[K]: what the routing looks
    like, as shares of calibration's texts. None where they were left out.
    """

    damage: np.ndarray
    routing: np.ndarray | None = None
    residual: np.ndarray | None = None
    mixture: np.ndarray | None = None


def price(
    table: BlockTable,
    routing: np.ndarray | None = None,
    routing_tokens: float | None = None,
    residual: np.ndarray | None = None,
    *,
    pseudo_choices: float = PSEUDO_CHOICES,
    strength: float = 1.0,
    sensitivity: bool = True,
) -> Prices:
    """Prices under ``routing`` float[layers, experts], recent choices of each expert, and features ``residual`` of the
    prompts, None: unknown.

    Choices count, not router weight: gates are inside the damage of a routed token. Features are what
    ``ResidualHeads.factor`` takes. The routing of ``routing_tokens`` tokens (None: enough of them) is averaged with
    that of calibration, which counts as many tokens as give an average expert ``pseudo_choices`` choices. ``strength``
    of the residual: the paper's alpha. Without ``sensitivity`` a weight of every block costs the same at the same
    width: the error of a uniform quantizer, a quarter for each bit more.
    """
    damage = table.expected if sensitivity else even_damage(table)
    shift = eta = mixture = chances = None
    if routing is not None:
        routing = np.asarray(routing, float)
        if routing_tokens is not None and pseudo_choices:
            weight = routing_tokens / (routing_tokens + pseudo_choices * table.experts / table.choices)
            routing = weight * shares(routing) + (1 - weight) * shares(table.usage)
        shift = table.routing_shift(routing)
        if table.kinds is not None and sensitivity and routing.any():
            mixture = table.kinds.mixture(routing)
            chances = table.kinds.of_blocks(mixture)
            damage = table.rate[:, None] * table.kinds.conditional(chances)
        damage = damage * shift[:, None]
    if residual is not None and table.heads is not None and strength:
        eta = table.heads.factor(residual, strength, chances)
        damage = above(steps(damage) * eta, damage[:, -1])
    return Prices(damage, shift, eta, mixture)


def steps(damage: np.ndarray) -> np.ndarray:
    """Damage that each transition adds, float64[n, B-1]: column ``j`` from level ``j + 1`` to level ``j`` (eq. 4)."""
    return np.maximum(damage[:, :-1] - damage[:, 1:], 0)


def even_damage(table: BlockTable, weight: np.ndarray | None = None) -> np.ndarray:
    """Damage float64[n, B] without calibration: of a block's size and ``weight`` float[n] (None: its routing share)."""
    if weight is None:
        weight = np.repeat(shares(table.usage).ravel(), 2)
    error = np.array([0.0 if bits == 16 else 4.0**-bits for bits in table.widths])
    return (weight * table.params)[:, None] * error


def above(added: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Damage float64[n, B] whose :func:`steps` are ``added`` float64[n, B-1], from ``rest`` float64[n] at the top."""
    damage = np.empty((len(added), added.shape[1] + 1), order="F")
    damage[:, -1] = rest
    for level in range(added.shape[1] - 1, -1, -1):
        np.add(damage[:, level + 1], added[:, level], out=damage[:, level])
    return damage

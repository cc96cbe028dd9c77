"""Random block tables for the planner's tests."""

from collections.abc import Callable

import numpy as np
import pytest

from planner import BlockTable

WIDTHS = (2, 3, 4, 5, 6, 16)
KINDS = ("smooth", "ties", "wild")


def _make_table(seed: int = 0, layers: int = 2, experts: int = 3, widths=WIDTHS, kind: str = "smooth") -> BlockTable:
    """``smooth``: heavy-tailed, nearly geometric damage. ``ties``: small integers, many of them equal or 0.

    ``wild``: damage far from convex, and pages that need not grow with bits.
    """
    rng = np.random.default_rng(seed)
    n, width = layers * experts * 2, len(widths)
    plane = np.where(np.arange(n) % 2, 1, 2)[:, None]
    pages = plane * np.array(widths) + np.arange(width) // 2
    damage = np.exp(rng.normal(0, 2, (n, 1))) * 4.0 ** -np.array(widths) * np.exp(rng.normal(0, 0.3, (n, width)))
    if kind == "ties":
        damage = rng.integers(0, 4, (n, width)).astype(float)
    if kind == "wild":
        damage = np.exp(rng.normal(0, 3, (n, width)))
        pages = rng.integers(1, 20, (n, width))
    damage = np.sort(damage, axis=1)[:, ::-1].copy()
    if widths[-1] == 16:
        damage[:, -1] = 0
    params = np.where(np.arange(n) % 2, 1000, 2000)
    return BlockTable(layers, experts, widths, damage, pages, params, rng.dirichlet(np.ones(experts), layers))


@pytest.fixture(scope="session")
def make_table() -> Callable[..., BlockTable]:
    """``make_table(seed, layers, experts, widths, kind)``; ``kind`` is smooth, ties or wild."""
    return _make_table

"""Importance through JAX: sums of squared gradients per sequence, experts only."""

import jax.numpy as jnp
import numpy as np
import pytest

from calib import report
from calib.anyprecision import quantize_block, weighted_error
from calib.sensitivity import fill_unrouted, paper_damage, routing_shares, squared_gradients

WINDOWS = np.array([[0, 1], [2, 3], [1, 1]])


def loss(params, tokens):
    return params["rest"].sum() * (params["experts"]["a"][tokens] ** 2).sum() / 2


def join(experts, rest):
    return {"experts": experts, "rest": rest}


def test_squares_are_summed_per_sequence():
    a, rest = np.array([1.0, 2, 3, 4, 5], np.float32), np.array([2.0], np.float32)
    seen = []
    importance, losses = squared_gradients(loss, join, {"a": a}, rest, WINDOWS, lambda *p: seen.append(p))
    # Sequence 3 reads entry 1 twice: its gradient doubles before it is squared.
    want = (2 * a) ** 2 * np.array([1, 1 + 4, 1, 1, 0])
    assert importance["a"].dtype == np.float32 and np.allclose(importance["a"], want)
    assert np.allclose(losses, [5, 25, 8]) and seen == [(1, 3), (2, 3), (3, 3)]


def test_small_terms_are_not_swamped():
    a = np.full(5, 1.0, np.float32).astype(jnp.bfloat16)  # bfloat16 inputs, float32 sums
    importance, _ = squared_gradients(loss, join, {"a": a}, np.ones(1, jnp.bfloat16), np.tile(WINDOWS[:1], (300, 1)))
    assert importance["a"][0] == 300


def test_broken_loss_names_the_window():
    with pytest.raises(ValueError, match="window 0 is nan"):
        squared_gradients(loss, join, {"a": np.full(5, np.nan)}, np.ones(1), WINDOWS)


def test_shares_sum_to_one_and_stay_finite():
    mass = lambda params, tokens: jnp.stack([jnp.bincount(tokens, length=4) * params, jnp.zeros(4)])  # noqa: E731
    shares = routing_shares(mass, np.float32(2), WINDOWS)
    assert np.allclose(shares, [[1 / 6, 3 / 6, 1 / 6, 1 / 6], [0, 0, 0, 0]])


def test_unrouted_experts_get_the_least_importance():
    importance = np.stack([np.full((2, 3), v, np.float32) for v in (4, 0, 2)])
    filled, empty = fill_unrouted(importance)
    assert empty.tolist() == [1] and (filled[1] == 2).all() and importance[1].max() == 0
    filled, empty = fill_unrouted(importance * 0)
    assert empty.tolist() == [0, 1, 2] and (filled == 1).all()
    assert fill_unrouted(importance[::2])[1].size == 0


def test_damage_falls_with_bits_and_matches_its_definition():
    rng = np.random.default_rng(0)
    weight, h = rng.normal(size=(8, 50)).astype(np.float32), rng.random((8, 50)).astype(np.float32)
    block = quantize_block(weight, h, (2, 3, 4), 2)
    damage = paper_damage(weight, h, block, (2, 3, 4))
    assert damage.dtype == np.float64 and (np.diff(damage) <= 0).all()
    assert damage[0] == weighted_error(weight, h, block, 2)


def test_report_table():
    rows = report.layer_rows(3, {"gate_up": {2: 1.0, 3: 0.5}, "down": {2: 0.0, 3: 0.0}}, {"gate_up": 4.0, "down": 0.0})
    assert rows[0] == {"layer": 3, "matrix": "gate_up", "relative_error": {"2": 0.25, "3": 0.125}}
    text = report.table(rows)
    assert "2 bits" in text and "2.500e-01" in text and len(text.splitlines()) == 4 and report.table([]) == ""

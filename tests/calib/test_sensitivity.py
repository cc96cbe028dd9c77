"""Damage by squared gradients, and what an expert without any is taken to be worth."""

import numpy as np
import pytest

from calib import report
from calib.anyprecision import quantize_block, weighted_error
from calib.sensitivity import column_weights, paper_damage, unrouted_importance


def test_unrouted_experts_get_the_least_importance():
    assert unrouted_importance(np.array([4.0, 0, 2])).tolist() == [4, 2, 2]
    assert unrouted_importance(np.zeros(3)).tolist() == [1, 1, 1]


def test_damage_falls_with_bits_and_matches_its_definition():
    rng = np.random.default_rng(0)
    weight, h = rng.normal(size=(8, 50)).astype(np.float32), rng.random((8, 50)).astype(np.float32)
    block = quantize_block(weight, h, (2, 3, 4), 2)
    damage = paper_damage(weight, h, block, (2, 3, 4))
    assert damage.dtype == np.float64 and (np.diff(damage) <= 0).all()
    assert damage[0] == weighted_error(weight, h, block, 2)


def test_report_table():
    errors = report.LayerErrors((2, 3))
    for _ in range(2):
        errors.add(0, np.array([0.5, 0.25]), 2.0)
        errors.add(1, np.zeros(2), 0.0)
    rows = errors.rows(3)
    assert rows[0] == {"layer": 3, "matrix": "gate_up", "relative_error": {"2": 0.25, "3": 0.125}}
    assert rows[1] == {"layer": 3, "matrix": "down", "relative_error": {"2": 0.0, "3": 0.0}}
    text = report.table(rows)
    assert "2 bits" in text and "2.500e-01" in text and len(text.splitlines()) == 4 and report.table([]) == ""


def test_columns_count_what_their_inputs_carry_and_rare_experts_the_mean():
    moments, tokens = np.array([[3200.0, 0.0], [0.0, 3200.0], [0.0, 0.0]]), np.array([1600, 1600, 0])
    weights = column_weights(moments, tokens)
    assert weights[0, 0] == pytest.approx(2.0, rel=0.02) and 0 < weights[0, 1] < 0.03
    assert weights[2].tolist() == [1.0, 1.0]
    assert column_weights(0 * moments, tokens).tolist() == [[1.0, 1.0]] * 3

"""Least-squares tables: never worse on the moment they are given, better where inputs are correlated."""

import numpy as np
import pytest

from calib.anyprecision import dequantize, quantize_block
from calib.refine import refine_block, shrunk

WIDTHS = (2, 3, 4)


def output_error(weight, block, moment, bits):
    gap = weight.astype(np.float64) - dequantize(block, bits)
    return float(np.einsum("nk,kl,nl->", gap, moment, gap))


@pytest.mark.parametrize("lut_rows", [1, 4])
def test_correlated_inputs_make_better_tables(lut_rows):
    rng = np.random.default_rng(0)
    weight = (rng.standard_t(5, (8, 48)) * 0.02).astype(np.float32)
    inputs = rng.normal(size=(400, 6)) @ rng.normal(size=(6, 48)) + 0.3 * rng.normal(size=(400, 48))
    moment = inputs.T @ inputs / 400
    block = quantize_block(weight, np.diag(moment), WIDTHS, lut_rows)
    better = refine_block(block, weight, moment, ridge=0.0)
    assert np.array_equal(better.codes, block.codes) and np.array_equal(better.scales, block.scales)
    for bits in WIDTHS:
        assert output_error(weight, better, moment, bits) < 0.9 * output_error(weight, block, moment, bits)
    one = refine_block(block, weight, moment, (3,))
    assert np.array_equal(one.luts[2], block.luts[2]) and not np.array_equal(one.luts[3], block.luts[3])


def test_independent_inputs_change_nothing_and_unused_codes_stay():
    rng = np.random.default_rng(1)
    weight = (rng.normal(size=(4, 9)) * 0.5).astype(np.float32)  # nine values, sixteen codes
    block = quantize_block(weight, None, WIDTHS)
    for moment in (np.eye(9), np.zeros((9, 9))):
        same = refine_block(block, weight, moment)
        for bits in WIDTHS:
            assert np.allclose(same.luts[bits].astype(float), block.luts[bits].astype(float), atol=1e-3)


def test_bad_moments_are_refused_in_a_sentence():
    weight = np.ones((2, 8), np.float32)
    block = quantize_block(weight, None, (2, 3))
    for moment, words in ((np.eye(7), "do not belong"), (np.full((8, 8), np.nan), "finite")):
        with pytest.raises(ValueError, match=words):
            refine_block(block, weight, moment)
    kept = refine_block(block, weight * np.float32(1e6), np.eye(8))  # its best table is beyond float16
    assert all(np.array_equal(kept.luts[b], block.luts[b]) for b in (2, 3))


def test_correlations_of_few_tokens_shrink_and_squares_stay():
    moment = np.array([[4.0, 2.0], [2.0, 1.0]])
    assert shrunk(moment, 32).tolist() == [[4.0, 1.0], [1.0, 1.0]]
    assert shrunk(moment, 10**9)[0, 1] == pytest.approx(2.0)

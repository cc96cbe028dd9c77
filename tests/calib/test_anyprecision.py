"""Blocks: nesting, scales, determinism."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib import anyprecision as ap
from pallas_kernels.bitplanes import block_pages, read_block
from pallas_kernels.pages import BlockShape, Geometry

WIDTHS = (2, 3, 4, 5, 6)


def heavy(rng, rows, cols, scale=0.02):
    return (rng.standard_t(4, (rows, cols)) * scale).astype(ml_dtypes.bfloat16).astype(np.float32)


def fisher(rng, rows, cols):
    return (np.exp(2 * rng.normal(size=(rows, cols))) * 1e-12).astype(np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.integers(1, 5),
    lut_rows=st.sampled_from([1, 2, 3, 4]),
    cols=st.sampled_from([1, 3, 31, 33, 65, 100]),
    widths=st.sampled_from([(2, 3, 4, 5, 6), (3, 4, 5, 6), (2,), (4, 5), (5, 6, 7, 8)]),
)
@settings(deadline=None, max_examples=40)
def test_block_is_well_formed_and_its_pages_read_back(seed, groups, lut_rows, cols, widths):
    rng = np.random.default_rng(seed)
    rows = groups * lut_rows
    weight, importance = heavy(rng, rows, cols), fisher(rng, rows, cols)
    block = ap.quantize_block(weight, importance, widths, lut_rows)
    assert block.codes.dtype == np.uint8 and block.codes.max() < 1 << widths[-1]
    assert block.scales.dtype == np.float16 and (lut_rows > 1 or (block.scales == 1).all())
    shape = BlockShape(rows, cols, lut_rows)
    geometry = Geometry(640, widths, True, shape, shape)
    pages = block_pages(block, weight.astype(ml_dtypes.bfloat16), geometry, 1)
    for bits in widths:
        lut = block.luts[bits]
        assert lut.dtype == np.float16 and lut.shape == (groups, 1 << bits)
        assert np.isfinite(lut).all() and (np.diff(lut.astype(np.float32), axis=1) >= 0).all()
        assert np.array_equal(read_block(pages, geometry, 1, bits), ap.dequantize(block, bits))


@pytest.mark.parametrize("lut_rows", [1, 4])
def test_error_falls_by_about_four_a_bit(lut_rows):
    rng = np.random.default_rng(0)
    weight = heavy(rng, 32, 512)
    block = ap.quantize_block(weight, None, WIDTHS, lut_rows)
    errors = [ap.weighted_error(weight, None, block, b) / ap.weighted_energy(weight, None) for b in WIDTHS]
    assert errors[0] < 0.25
    assert all(2.5 < a / b < 6 for a, b in itertools.pairwise(errors))


def test_importance_moves_precision_to_where_it_matters():
    rng = np.random.default_rng(1)
    weight, importance = heavy(rng, 8, 256), fisher(rng, 8, 256)
    blind, seeing = (ap.quantize_block(weight, h, (3,), 1) for h in (None, importance))
    assert ap.weighted_error(weight, importance, seeing, 3) < 0.8 * ap.weighted_error(weight, importance, blind, 3)


def test_importance_of_columns_counts_for_every_row():
    rng = np.random.default_rng(4)
    weight, importance = heavy(rng, 6, 90), fisher(rng, 1, 90)[0]
    short, full = (ap.quantize_block(weight, h, WIDTHS, 2) for h in (importance, np.tile(importance, (6, 1))))
    assert np.array_equal(short.codes, full.codes)
    assert ap.weighted_error(weight, importance, short, 4) == ap.weighted_error(
        weight, np.tile(importance, (6, 1)), full, 4
    )


def test_same_bytes_whatever_the_chunks(monkeypatch):
    rng = np.random.default_rng(2)
    weight, importance = heavy(rng, 24, 70), fisher(rng, 24, 70)
    whole = ap.quantize_block(weight, importance, WIDTHS, 2)
    monkeypatch.setattr(ap, "CHUNK_ELEMENTS", 1)
    pieces = ap.quantize_block(weight, importance, WIDTHS, 2)
    assert np.array_equal(whole.codes, pieces.codes) and np.array_equal(whole.scales, pieces.scales)
    assert all(np.array_equal(whole.luts[b], pieces.luts[b]) for b in WIDTHS)


def test_zero_constant_and_extreme_rows_stay_finite():
    weight = np.zeros((8, 40), np.float32)
    weight[1], weight[2, 7], weight[3] = 0.125, -3.0, 1e-12
    weight[4] = np.linspace(-6e4, 6e4, 40)
    for lut_rows in (1, 2, 8):
        block = ap.quantize_block(weight, None, WIDTHS, lut_rows)
        assert np.isfinite(block.scales).all() and (block.scales > 0).all() and block.scales[0] == 1
        for bits in WIDTHS:
            assert np.isfinite(ap.dequantize(block, bits)).all()
    exact = ap.dequantize(ap.quantize_block(weight, None, WIDTHS, 1), 2)
    assert np.array_equal(exact[:3], weight[:3])


def test_bad_blocks_are_refused_in_a_sentence():
    good = np.ones((4, 8), np.float32)
    for weight, importance, widths, lut_rows, words in (
        (good * np.nan, None, WIDTHS, 1, "finite"),
        (good * 1e5, None, WIDTHS, 1, "float16"),
        (good * 1e5, None, WIDTHS, 2, "float16"),
        (good, None, (2, 4), 1, "contiguous"),
        (good, None, (1, 2), 1, "2..8"),
        (good, None, WIDTHS, 3, "divide"),
        (good, -good, WIDTHS, 1, "not negative"),
        (good, good * np.nan, WIDTHS, 1, "finite"),
        (good, good[:2], WIDTHS, 1, "a number a column"),
        (good[0], None, WIDTHS, 1, "matrix"),
    ):
        with pytest.raises(ValueError, match=words):
            ap.quantize_block(weight, importance, widths, lut_rows)

"""LUT groups are chosen by error at equal pages."""

import numpy as np

from calib import lut_groups

WIDTHS = (2, 3, 4, 5, 6)


def sample(rng, rows, cols):
    weight = (rng.standard_t(4, (rows, cols)) * 0.02).astype(np.float32)
    return [(weight, (np.exp(2 * rng.normal(size=weight.shape)) * 1e-12).astype(np.float32))]


def test_lut_candidates():
    assert lut_groups.lut_candidates(192) == (1, 2, 4, 8, 16, 32, 64)
    assert lut_groups.lut_candidates(12) == (1, 2, 4) and lut_groups.lut_candidates(7) == (1,)


def test_best_curve_judges_at_equal_pages():
    dear = [(20, 0.1), (40, 0.01)]
    cheap = [(10, 0.11), (20, 0.011)]  # a little worse a width, half the pages
    assert lut_groups.best_curve({1: dear, 4: cheap}) == 4
    assert lut_groups.best_curve({1: dear, 4: dear}) == 1
    assert lut_groups.best_curve({1: [(20, 0.1), (40, 0.01)], 4: [(20, 0.2), (40, 0.02)]}) == 1


def test_choice_shares_tables_on_short_rows_only():
    rng = np.random.default_rng(3)
    shapes = ((192, 256), (256, 96))
    short = lut_groups.choose_lut_rows([sample(rng, *s) for s in shapes], shapes, WIDTHS, True, 64)
    assert short.lut_rows[0] > 1 and short.lut_rows[1] > 1
    long = lut_groups.choose_lut_rows(
        (sample(rng, 8, 4096), sample(rng, 96, 32)), ((8, 4096), (96, 32)), WIDTHS, True, 64
    )
    assert long.lut_rows[0] <= 2
    assert long.page_words >= 2048 and set(short.errors[0]) == {1, 2, 4, 8, 16, 32, 64}
    fixed = lut_groups.choose_lut_rows(
        (sample(rng, 64, 96), sample(rng, 96, 32)),
        ((64, 96), (96, 32)),
        WIDTHS,
        True,
        64,
        candidates=((1,), (8,)),
        page_words=768,
    )
    assert fixed.lut_rows == (1, 8) and fixed.page_words == 768

"""Nested one-dimensional k-means: optimal seeds on short rows, and every rule for odd clusters."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calib.kmeans import WEIGHT_FLOOR, nested_kmeans
from calib.kmeans_seed import BINS

SEEDS = st.integers(0, 2**32 - 1)


def cost(values, weights, codes, table):
    return float((weights * (values - table[codes]) ** 2).sum())


def dp_oracle(values, weights, clusters):
    """Least weighted error of ``clusters`` intervals of one sorted row, by the textbook O(k n^2) program."""
    order = np.argsort(values, kind="stable")
    x, w = values[order].astype(np.float64), weights[order].astype(np.float64)
    x = x - np.average(x, weights=w)
    mass, moment, square = (np.concatenate([[0], np.cumsum(part)]) for part in (w, w * x, w * x * x))
    inside = mass[:, None] - mass  # segment[j, i]: error of values i..j-1 about their mean
    explained = np.divide((moment[:, None] - moment) ** 2, inside, out=np.zeros_like(inside), where=inside > 0)
    segment = square[:, None] - square - explained
    segment[np.triu_indices(len(segment), 1)] = np.inf
    best = segment[:, 0]
    for _ in range(clusters - 1):
        best = (best + segment).min(axis=1)
    return best[-1]


@pytest.mark.parametrize("bits", [2, 3, 5])
@pytest.mark.parametrize("cols", [5, 17, 60])
@given(seed=SEEDS, spread=st.sampled_from([0.0, 1.0, 6.0]))
@settings(deadline=None, max_examples=6)
@example(seed=1, spread=6.0)
def test_seed_is_optimal_on_short_rows(bits, cols, seed, spread):
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (3, cols)).astype(np.float32)
    weights = np.exp(spread * rng.normal(size=(3, cols))).astype(np.float32)
    weights[rng.random((3, cols)) < 0.1] = 0
    codes, tables = nested_kmeans(values, weights, bits, bits)
    # What is minimized has the floor that keeps weightless elements in sensible clusters.
    weights = np.maximum(weights.astype(np.float64), WEIGHT_FLOOR * weights.mean(1, keepdims=True, dtype=np.float64))
    for row in range(3):
        got = cost(values[row].astype(np.float64), weights[row], codes[row], tables[bits][row])
        want = dp_oracle(values[row], weights[row], 1 << bits)
        assert got <= want * (1 + 1e-6) + 1e-12 * (weights[row] * values[row] ** 2).sum()


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("tail,spread", [(1, 0), (3, 2), (5, 4), (100, 0)])
def test_seed_is_near_optimal_on_long_rows(bits, tail, spread):
    rng = np.random.default_rng(1)
    rows, cols = 3, 5 * BINS
    values = rng.standard_t(tail, (rows, cols)).astype(np.float32)
    weights = np.exp(spread * rng.normal(size=(rows, cols))).astype(np.float32)
    codes, tables = nested_kmeans(values, weights, bits, bits)
    for row in range(rows):
        got = cost(values[row].astype(np.float64), weights[row], codes[row], tables[bits][row])
        assert got <= 1.02 * dp_oracle(values[row], weights[row], 1 << bits)


@given(seed=SEEDS, bits=st.tuples(st.integers(2, 8), st.integers(0, 6)), cols=st.integers(1, 150))
@settings(deadline=None, max_examples=40)
def test_codes_are_rank_order_and_tables_ascend(seed, bits, cols):
    first, parent = bits[0], min(8, bits[0] + bits[1])
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(size=(4, cols)), int(rng.integers(0, 4))).astype(np.float32)  # many ties
    weights = np.exp(3 * rng.normal(size=(4, cols))).astype(np.float32)
    weights[rng.random((4, cols)) < 0.3] = 0
    codes, tables = nested_kmeans(values, weights, first, parent)
    assert sorted(tables) == list(range(first, parent + 1))
    for row in range(4):
        order = np.argsort(values[row], kind="stable")
        assert (np.diff(codes[row][order].astype(int)) >= 0).all()
    previous = np.inf
    for b, table in tables.items():
        assert table.shape == (4, 1 << b) and np.isfinite(table).all() and (np.diff(table, axis=1) >= 0).all()
        assert (table >= values.min(1, keepdims=True) - 1e-6).all()
        assert (table <= values.max(1, keepdims=True) + 1e-6).all()
        error = sum(cost(values[r], weights[r], codes[r] >> (parent - b), table[r]) for r in range(4))
        assert error <= previous * (1 + 1e-9) + 1e-9
        previous = error


def test_each_split_is_the_best_cut():
    rng = np.random.default_rng(5)
    values = rng.normal(size=(1, 60)).astype(np.float32)
    weights = np.exp(rng.normal(size=(1, 60))).astype(np.float32)
    codes, tables = nested_kmeans(values, weights, 2, 3)
    for cluster in range(4):
        mine = codes[0] >> 1 == cluster
        got = cost(values[0, mine].astype(np.float64), weights[0, mine], codes[0, mine], tables[3][0])
        assert got == pytest.approx(dp_oracle(values[0, mine], weights[0, mine], 2), rel=1e-9, abs=1e-12)


def test_constant_and_single_values():
    for values in (np.full((2, 9), 0.25, np.float32), np.full((1, 1), -3, np.float32), np.zeros((1, 5), np.float32)):
        codes, tables = nested_kmeans(values, None, 2, 6)
        for bits, table in tables.items():
            got = np.take_along_axis(table, (codes >> (6 - bits)).astype(np.int64), axis=1)
            assert np.array_equal(got.astype(np.float32), values)


def test_row_without_weight_counts_elements_equally():
    values = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    plain = nested_kmeans(values, None, 2, 5)
    weightless = nested_kmeans(values, np.zeros_like(values), 2, 5)
    assert np.array_equal(plain[0], weightless[0])
    assert all(np.array_equal(plain[1][b], weightless[1][b]) for b in plain[1])


def test_one_weighted_element_is_exact_at_every_width():
    values = np.linspace(-1, 1, 40, dtype=np.float32)[None]
    weights = np.zeros_like(values)
    weights[0, 11] = 1e-30
    codes, tables = nested_kmeans(values, weights, 2, 6)
    for bits, table in tables.items():
        assert np.isfinite(table).all()
        assert table[0, codes[0, 11] >> (6 - bits)] == pytest.approx(values[0, 11], abs=1e-7)


def test_weightless_cluster_is_split_by_plain_means():
    # Three values have all the weight: the fourth cluster and all splits are free for the others.
    values = np.concatenate([[0, 10, 20], np.linspace(30, 31, 8)]).astype(np.float32)[None]
    weights = np.zeros_like(values)
    weights[0, :3] = 1
    codes, tables = nested_kmeans(values, weights, 2, 5)
    assert np.allclose(tables[2][0], [0, 10, 20, 30.5], atol=1e-5)
    assert np.allclose(tables[5][0][codes[0]], values[0], atol=1e-5)


def test_two_elements_part_and_one_goes_left():
    values = np.array([[0.0, 1.0, 10.0, 20.0, 30.0]], np.float32)
    codes, tables = nested_kmeans(values, np.ones_like(values), 2, 4)
    assert np.allclose(tables[4][0][codes[0]], values[0])
    assert codes[0, 2] & 3 == 0 and codes[0, 3] & 3 == 0  # single elements stay left
    assert codes[0, 1] - codes[0, 0] == 2  # the pair parts at the first split


def test_tiny_weights_still_order_their_neighbourhood():
    rng = np.random.default_rng(3)
    values = np.sort(rng.normal(size=(1, 300)).astype(np.float32), axis=1)
    weights = np.full_like(values, 1e-38)  # the smallest Fisher beside one ordinary value
    weights[0, 200] = 1
    codes, tables = nested_kmeans(values, weights, 2, 6)
    assert np.abs(tables[6][0][codes[0]] - values[0]).mean() < 0.05


def test_rows_do_not_influence_each_other():
    rng = np.random.default_rng(9)
    values = rng.normal(size=(7, 90)).astype(np.float32)
    weights = np.exp(2 * rng.normal(size=(7, 90))).astype(np.float32)
    codes, tables = nested_kmeans(values, weights, 2, 6)
    for row in range(7):
        alone, table = nested_kmeans(values[row : row + 1], weights[row : row + 1], 2, 6)
        assert np.array_equal(alone[0], codes[row])
        assert np.allclose(table[6][0], tables[6][row], rtol=1e-10, atol=1e-12)

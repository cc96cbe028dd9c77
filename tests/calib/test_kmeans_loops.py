"""The loops of k-means in C++ and in NumPy: the same bits, so that no result tells whether a compiler was there."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calib import kmeans_loops, kmeans_native
from calib.kmeans import nested_kmeans
from calib.kmeans_seed import BINS

pytestmark = pytest.mark.skipif(kmeans_native.library() is None, reason="the C++ library is not built")

SEEDS = st.integers(0, 2**32 - 1)
TINY = st.integers(1, 12)


def in_numpy(function, *args):
    with patch.object(kmeans_native, "library", lambda: None):
        return function(*args)


def same(got, want):
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def assert_same(name, *args):
    got = getattr(kmeans_native, name)(*args)
    assert same(got, in_numpy(getattr(kmeans_loops, name), *args))


def groups(rng, cols, digits, weightless):
    """Sorted values, with ties where they have few digits, and weights from the floor up."""
    x = np.sort(rng.standard_t(2, (3, cols)) * 10.0 ** rng.integers(-30, 30), axis=1)
    if digits is not None:
        x = np.sort(np.round(rng.normal(size=(3, cols)), digits), axis=1)
    w = np.exp(3 * rng.normal(size=(3, cols)))
    w[rng.random(w.shape) < weightless] = 1e-8
    return x - x.mean(1, keepdims=True), w


def borders_of(rng, cols, clusters):
    inner = np.sort(rng.integers(0, cols + 1, (3, clusters - 1)), axis=1)
    return np.concatenate([np.zeros((3, 1), np.int64), inner, np.full((3, 1), cols)], axis=1)


GROUPS = dict(
    seed=SEEDS, cols=st.one_of(TINY, st.integers(1, 300)), digits=st.sampled_from([None, 0, 1]),
    weightless=st.sampled_from([0.0, 0.5, 1.0]), clusters=st.sampled_from([2, 4, 8, 64]),
)  # fmt: skip


@given(**GROUPS)
@settings(deadline=None, max_examples=150)
def test_every_loop_agrees_bit_for_bit(seed, cols, digits, weightless, clusters):
    rng = np.random.default_rng(seed)
    x, w = groups(rng, cols, digits, weightless)
    sums = kmeans_loops.prefix(w), kmeans_loops.prefix(w * x)
    assert_same("prefix", w * x)
    targets = np.where(rng.random((3, 20)) < 0.5, x[:, rng.integers(0, cols, 20)], rng.normal(size=(3, 20)))
    assert_same("search", x, targets)
    borders = borders_of(rng, cols, clusters)  # not the best, some empty
    assert_same("lloyd", x, sums, borders, 6)
    assert_same("best_cuts", x, w, sums[0], borders, rng.permuted(x, axis=1)[:, np.arange(clusters) % cols],
                np.diff(kmeans_loops.row_take(sums[0], borders), axis=1))  # fmt: skip
    count = int(rng.integers(1, 40))
    places = np.sort(rng.integers(0, cols + 1, (3, clusters - 1, count)), axis=2)
    assert_same("best_path", sums, places)
    assert_same("best_path", sums, np.broadcast_to(places[:, :1], places.shape))  # the same places for all borders


def test_minus_zero_keeps_its_sign():
    values = np.array([[-0.0, -0.0, 0.0, -0.0]])
    assert_same("prefix", values)
    assert np.signbit(kmeans_native.prefix(values)).tolist() == [[False, True, True, False, False]]


@given(
    seed=SEEDS, cols=st.one_of(TINY, st.integers(1, 5 * BINS)), kind=st.sampled_from(["plain", "ties", "one value"]),
    scale=st.sampled_from([1e-38, 1e-3, 1.0, 1e37]), weights=st.sampled_from([None, 0.0, 1e-30, 1e30]),
    bits=st.sampled_from([(2, 6), (3, 6), (4, 5), (6, 8)]),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
@example(seed=0, cols=5 * BINS, kind="plain", scale=1.0, weights=1.0, bits=(2, 6))
@example(seed=0, cols=1, kind="one value", scale=1.0, weights=0.0, bits=(2, 6))
def test_clusterings_agree_bit_for_bit(seed, cols, kind, scale, weights, bits):
    rng = np.random.default_rng(seed)
    values = rng.standard_t(5, (3, cols)).clip(-10, 10)
    values = {"plain": values, "ties": np.round(values), "one value": np.full((3, cols), 0.3)}[kind]
    values = (values * scale).astype(np.float32)
    if weights is not None:
        weights = (np.exp(4 * rng.normal(size=values.shape)) * weights).astype(np.float32)
        weights[rng.random(values.shape) < 0.3] = 0
    codes, tables = nested_kmeans(values, weights, *bits)
    want, want_tables = in_numpy(nested_kmeans, values, weights, *bits)
    assert same(codes, want)
    assert all(same(tables[b], want_tables[b]) for b in want_tables) and tables.keys() == want_tables.keys()


def test_nothing_outside_the_arrays_is_read():
    x, sums = np.zeros((2, 5)), (np.zeros((2, 6)), np.zeros((2, 6)))
    with pytest.raises(ValueError, match="places from 0 to 6 among 5"):
        kmeans_native.best_path(sums, np.array([[[0, 6]], [[0, 1]]]))
    with pytest.raises(ValueError, match="places from -1"):
        kmeans_native.lloyd(x, sums, np.array([[0, -1, 5], [0, 1, 5]]), 6)
    with pytest.raises(ValueError, match="expected a table of 2 x 6"):
        kmeans_native.lloyd(x, (sums[0], x), np.array([[0, 1, 5], [0, 1, 5]]), 6)
    with pytest.raises(ValueError, match="expected a table of 2 x 2"):
        kmeans_native.best_cuts(x, x, sums[0], np.array([[0, 1, 5], [0, 1, 5]]), np.zeros((2, 3)), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="expected a table of 2 x 3"):
        kmeans_native.search(x, np.zeros((1, 3)))

"""Windows of tokens: one length, spread over all material, short text still useful."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.text import LEAST_KIND_TOKENS, Windows, choose, kinds, share_out, thin, windows


def test_windows_do_not_overlap_and_drop_tails():
    got, source, quota = windows([np.arange(10), np.arange(100, 107)], 3)
    assert source.tolist() == [0, 0, 0, 1, 1] and quota.tolist() == [3, 2]
    assert got.dtype == np.int32
    assert got.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [100, 101, 102], [103, 104, 105]]


def test_too_many_windows_are_thinned_evenly():
    got = windows([np.arange(1000)], 10, count=4).tokens
    assert got[:, 0].tolist() == [0, 250, 500, 750]


def test_strings_and_bos():
    got = windows(["abcdef"], 3, encode=lambda text: [ord(c) for c in text], bos=1)
    assert got.tokens.tolist() == [[1, 97, 98], [1, 99, 100], [1, 101, 102]]


def test_short_text_shrinks_the_window():
    assert windows([[1, 2, 3], [4]], 512).tokens.tolist() == [[1, 2, 3]]


def test_text_that_cannot_be_used():
    for texts, words in (([], "at least 2"), ([[1]], "at least 2"), (["x"], "tokenizer"), ([[0.5, 1.5]], "integers")):
        with pytest.raises(ValueError, match=words):
            windows(texts, 8)
    for weights in ([1], [1, 0], [1, float("nan")]):
        with pytest.raises(ValueError, match="one positive number for each of the 2 texts"):
            windows([np.arange(9), np.arange(9)], 3, weights=weights)


def test_sources_are_mixed_by_weight_and_the_short_one_gives_all():
    texts = [np.arange(300), np.arange(1000), np.arange(20)]
    assert windows(texts, 10, 30).quota.tolist() == [14, 14, 2]
    assert windows(texts, 10, 30, weights=[1, 3, 1]).quota.tolist() == [7, 21, 2]
    assert windows(texts, 10, 1000).quota.tolist() == [30, 100, 2]
    pool = windows(texts, 10, 30, pool=2)
    assert np.bincount(pool.source).tolist() == [28, 28, 2] and pool.quota.tolist() == [14, 14, 2]


def test_long_text_is_thinned_evenly():
    text = "".join(chr(97 + i // 10) for i in range(200))
    assert thin(text, 1000, 30) == [text[i : i + 30] for i in range(0, 200, 30)]
    assert thin(text, 40, 10) == ["a" * 10, "f" * 10, "k" * 10, "p" * 10]


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.01, 100)), min_size=1, max_size=6), st.integers(0, 200))
def test_shares_add_up(sources, count):
    available, weights = (np.array(column) for column in zip(*sources, strict=True))
    quota = share_out(available, weights, count)
    assert quota.sum() == min(count, available.sum()) and (quota >= 0).all() and (quota <= available).all()


def test_windows_that_reach_rare_experts_are_chosen():
    rng = np.random.default_rng(0)
    counts = rng.poisson(20, (12, 1, 4))
    counts[:, 0, 3] = 0
    counts[[4, 9], 0, 3] = 1
    candidates = Windows(np.zeros((12, 5), np.int32), np.repeat([0, 1], 6), np.array([2, 3]))
    chosen = choose(candidates, counts)
    assert {4, 9} <= set(chosen.tolist()) and (np.bincount(candidates.source[chosen]) == [2, 3]).all()
    assert choose(candidates._replace(quota=np.array([6, 6])), counts).tolist() == list(range(12))


def test_texts_are_kinds_of_their_own_where_there_is_enough_of_them():
    windows = LEAST_KIND_TOKENS // 64
    assert kinds(np.array([windows, 1, windows, 0, windows - 1]), 64).tolist() == [0, 2, 1, 2, 2]
    assert kinds(np.full(100, 3), 64).max() == 0, "a hundred small files are one kind"
    assert kinds(np.array([windows]), 64).tolist() == [0]

"""Windows of tokens: one length, spread over all material, short text still useful."""

import numpy as np
import pytest

from calib.text import windows


def test_windows_do_not_overlap_and_drop_tails():
    got = windows([np.arange(10), np.arange(100, 107)], 3)
    assert got.dtype == np.int32
    assert got.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [100, 101, 102], [103, 104, 105]]


def test_too_many_windows_are_thinned_evenly():
    got = windows([np.arange(1000)], 10, count=4)
    assert got[:, 0].tolist() == [0, 250, 500, 750]


def test_strings_and_bos():
    got = windows(["abcdef"], 3, encode=lambda text: [ord(c) for c in text], bos=1)
    assert got.tolist() == [[1, 97, 98], [1, 99, 100], [1, 101, 102]]


def test_short_text_shrinks_the_window():
    assert windows([[1, 2, 3], [4]], 512).tolist() == [[1, 2, 3]]


def test_text_that_cannot_be_used():
    for texts, words in (([], "at least 2"), ([[1]], "at least 2"), (["x"], "tokenizer"), ([[0.5, 1.5]], "integers")):
        with pytest.raises(ValueError, match=words):
            windows(texts, 8)

"""Matrices of any-precision-llm packs, which ``packed`` writes bit by bit by the description of their format."""

import numpy as np
import pytest

from calib.anyprecision import dequantize
from calib.packs import pack_block, unpack_codes


@pytest.mark.parametrize("cols", [32, 96, 704, 1024, 1408, 2112])
@pytest.mark.parametrize("parent", [3, 8])
def test_codes_are_read_bit_for_bit(packed, cols, parent):
    codes = np.random.default_rng(cols).integers(0, 1 << parent, (2, cols), np.uint8)
    assert np.array_equal(unpack_codes(packed(codes, parent)), codes)


def test_block_joins_matrices_and_keeps_tables_that_do_not_ascend(packed):
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 32, (rows, 64), np.uint8) for rows in (3, 5)]
    luts = [{b: rng.normal(size=(len(c), 1 << b)).astype(np.float16) for b in (3, 4, 5)} for c in codes]
    block = pack_block([(packed(c, 5), table) for c, table in zip(codes, luts, strict=True)])
    assert block.parent == 5 and (block.scales == 1).all()
    for bits in (3, 4, 5):
        want = [np.take_along_axis(t[bits], (c >> (5 - bits)).astype(int), 1) for c, t in zip(codes, luts, strict=True)]
        assert np.array_equal(dequantize(block, bits), np.concatenate(want).astype(np.float32))


def test_broken_matrices_are_refused_in_a_sentence(packed):
    qweight, luts = packed(np.zeros((2, 32), np.uint8), 3), {3: np.zeros((2, 8), np.float16)}
    for bad, words in (
        ((qweight[:2], luts), "qweight must be"),
        ((qweight.astype(np.int64), luts), "qweight must be"),
        ((qweight, {3: luts[3][:, :4]}), "lut3 must be"),
        ((qweight, {3: luts[3].astype(np.float32)}), "lut3 must be"),
        ((qweight, {3: luts[3] + np.float16(np.inf)}), "not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            pack_block([bad])

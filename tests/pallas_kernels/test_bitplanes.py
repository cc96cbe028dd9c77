"""The byte format of blocks: every packer has an inverse, and the oracle reads what the packers wrote."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import bitplanes as bp
from pallas_kernels.pages import BlockShape, Geometry, RowLayout

SIZES = st.integers(1, 70)


@dataclass
class Block:
    codes: np.ndarray
    luts: dict
    scales: np.ndarray


def make_block(shape: BlockShape, widths, rng) -> Block:
    codes = rng.integers(0, 1 << widths[-1], (shape.rows, shape.cols), dtype=np.uint8)
    luts = {b: np.sort(rng.normal(size=(shape.groups, 1 << b)).astype(np.float16), axis=1) for b in widths}
    scales = np.ones(shape.rows) if shape.lut_rows == 1 else rng.uniform(0.5, 2, shape.rows)
    return Block(codes, luts, scales.astype(np.float16))


@given(SIZES, SIZES, st.integers(2, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_planes_round_trip_and_nest(rows, cols, parent, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << parent, (rows, cols), dtype=np.uint8)
    planes = bp.pack_planes(codes, parent)
    assert planes.dtype == np.uint32 and planes.shape == (parent, rows, -(-cols // 32))
    for bits in range(1, parent + 1):
        assert np.array_equal(bp.unpack_planes(planes[:bits], cols), codes >> (parent - bits))


def test_plane_bit_positions():
    codes = np.zeros((1, 40), np.uint8)
    codes[0, 0], codes[0, 33] = 0b10, 0b01
    assert bp.pack_planes(codes, 2).tolist() == [[[1, 0]], [[0, 2]]]


def test_planes_refuse_codes_that_do_not_fit():
    with pytest.raises(ValueError, match="code 4 does not fit in 2 planes"):
        bp.pack_planes(np.full((1, 1), 4, np.uint8), 2)
    with pytest.raises(ValueError, match="uint8"):
        bp.pack_planes(np.zeros((1, 1), np.int32), 2)


@given(st.integers(1, 9), st.integers(1, 7), st.integers(2, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_lut_records_round_trip(groups, lut_rows, bits, seed):
    rng = np.random.default_rng(seed)
    scales = rng.normal(size=groups * lut_rows).astype(np.float16)
    lut = rng.normal(size=(groups, 1 << bits)).astype(np.float16)
    records = bp.lut_records(scales, lut, lut_rows)
    assert records.shape == (groups, BlockShape(groups * lut_rows, 1, lut_rows).lut_row_words(bits))
    back = bp.split_lut_records(records, lut_rows, bits)
    assert np.array_equal(back[0], scales) and np.array_equal(back[1], lut)


@given(SIZES, SIZES, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_bf16_rows_round_trip(rows, cols, seed):
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (rows, cols), dtype=np.uint16)
    weight = bits.view(ml_dtypes.bfloat16)
    packed = bp.bf16_rows(weight)
    assert packed.shape == (rows, -(-cols // 2))
    assert np.array_equal(bp.split_bf16_rows(packed, cols).view(np.uint16), bits)


@given(SIZES, st.integers(1, 40), st.integers(0, 100), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_pages_round_trip(rows, row_words, spare, seed):
    layout = RowLayout(rows, row_words, row_words + spare)
    data = np.random.default_rng(seed).integers(0, 2**32, (rows, row_words), dtype=np.uint32)
    pages = bp.rows_to_pages(data, layout)
    assert pages.shape == (layout.pages, layout.page_words)
    assert np.array_equal(bp.pages_to_rows(pages, layout), data)
    assert int((pages != 0).sum()) == int((data != 0).sum())


@pytest.mark.parametrize("lut_rows", [1, 3, 6])
@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("widths", [(2, 3, 4, 5, 6), (3, 4, 5, 6), (7, 8)])
def test_oracle_reads_what_was_packed(lut_rows, fallback, widths):
    rng = np.random.default_rng(0)
    geometry = Geometry(192, widths, fallback, BlockShape(42, 50, lut_rows), BlockShape(24, 33, lut_rows))
    for matrix in (0, 1):
        shape = geometry.shape(matrix)
        block = make_block(shape, widths, rng)
        weight = rng.normal(size=(shape.rows, shape.cols)).astype(ml_dtypes.bfloat16)
        pages = bp.block_pages(block, weight, geometry, matrix)
        assert pages.shape == (geometry.host_block_pages(matrix), geometry.page_words)
        for bits in widths:
            lut = np.repeat(block.luts[bits].astype(np.float32), shape.lut_rows, axis=0)
            want = block.scales.astype(np.float32)[:, None] * np.take_along_axis(
                lut, (block.codes >> (widths[-1] - bits)).astype(np.int64), axis=1
            )
            got = bp.read_block(pages, geometry, matrix, bits)
            assert got.dtype == np.float32 and np.array_equal(got, want)
        if fallback:
            assert np.array_equal(bp.read_block(pages, geometry, matrix, 16), weight.astype(np.float32))


def test_block_pages_names_what_disagrees():
    geometry = Geometry(192, (2, 3), True, BlockShape(4, 8), BlockShape(4, 8))
    block = make_block(BlockShape(4, 8), (2, 3), np.random.default_rng(0))
    with pytest.raises(ValueError, match="original weights"):
        bp.block_pages(block, None, geometry, 0)
    with pytest.raises(ValueError, match="cast the weights"):
        bp.block_pages(block, np.zeros((4, 8), np.float32), geometry, 0)
    with pytest.raises(ValueError, match=r"block of \(4, 8\)"):
        bp.block_pages(make_block(BlockShape(4, 9), (2, 3), np.random.default_rng(0)), None, geometry, 0)

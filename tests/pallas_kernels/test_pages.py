"""Page geometry: rows are whole, planes are prefixes, and the real models get the page size the design names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.pages import BlockShape, Geometry, RowLayout, choose_page_words

shapes = st.builds(
    lambda groups, lut_rows, cols: BlockShape(groups * lut_rows, cols, lut_rows),
    st.integers(1, 40), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300),
)  # fmt: skip


@st.composite
def geometries(draw):
    low = draw(st.integers(2, 6))
    widths = tuple(range(low, draw(st.integers(low, 8)) + 1))
    return Geometry(draw(st.integers(160, 600)), widths, draw(st.booleans()), draw(shapes), draw(shapes))


@given(geometries(), st.integers(0, 1))
def test_a_block_at_any_precision_is_a_prefix_of_planes_and_one_lut(geometry, matrix):
    seen = set()
    for low, high in zip(geometry.widths, geometry.widths[1:], strict=False):
        planes = low * geometry.plane_layout(matrix).pages
        assert geometry.host_pages(matrix, low)[:planes] == geometry.host_pages(matrix, high)[:planes]
        assert geometry.table_slots(matrix, low)[:planes] == tuple(range(planes))
    for bits in geometry.all_bits:
        host, slots = geometry.host_pages(matrix, bits), geometry.table_slots(matrix, bits)
        assert len(host) == len(set(host)) == len(slots) == len(set(slots)) == geometry.block_pages(matrix, bits)
        assert max(slots) < geometry.slots and max(host) < geometry.host_block_pages(matrix)
        seen.update(host)
    # Every page on the host belongs to some precision.
    assert seen == set(range(geometry.host_block_pages(matrix)))


@given(geometries())
def test_blocks_tile_the_layer_file_and_json_round_trips(geometry):
    at = 0
    for expert in range(3):
        for matrix in (0, 1):
            assert geometry.host_block_start(expert, matrix) == at
            at += geometry.host_block_pages(matrix)
    assert geometry.host_layer_pages(3) == at
    assert Geometry.from_json(geometry.to_json()) == geometry


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(50, 200))
def test_pages_hold_whole_rows(rows, row_words, page_words):
    layout = RowLayout(rows, row_words, page_words)
    assert layout.rows_per_page * row_words <= page_words
    assert (layout.pages - 1) * layout.rows_per_page < rows <= layout.pages * layout.rows_per_page


def test_page_size_of_real_shapes():
    widths = (2, 3, 4, 5, 6)
    # Qwen1.5-MoE: 44 KiB divides gate_up planes, down planes and 16-bit rows exactly.
    assert choose_page_words(BlockShape(2816, 2048, 4), BlockShape(2048, 1408, 4), widths, True, 1024) * 4 == 44 * 1024
    assert choose_page_words(BlockShape(192, 256, 16), BlockShape(256, 96, 16), widths, True, 64) == 768


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockShape(6, 4, 4), "does not divide"),
        (lambda: BlockShape(0, 4), "positive"),
        (lambda: Geometry(64, (2, 4), True, BlockShape(8, 8), BlockShape(8, 8)), "contiguous"),
        (lambda: Geometry(64, (1, 2), True, BlockShape(8, 8), BlockShape(8, 8)), "2..8"),
        (lambda: Geometry(64, (2, 3), True, BlockShape(8, 300), BlockShape(8, 8)), "cannot hold"),
        (lambda: Geometry(64, (2, 3), False, BlockShape(8, 8), BlockShape(8, 8)).host_pages(0, 16), "16 bits are not"),
        (lambda: choose_page_words(BlockShape(8, 8), BlockShape(8, 8), (2,), True, 10**6), "256 KiB"),
    ],
)
def test_impossible_shapes_are_sentences(make, words):
    with pytest.raises(ValueError, match=words):
        make()

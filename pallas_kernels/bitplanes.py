"""The bytes of a block: codes to planes, tables to records, weights to 16-bit rows, rows to pages, and back.

NumPy only, on the host. Words are uint32 in native order here; :mod:`pwjax.memory.host_store` reads them from
little-endian files. ``read_block`` is written on its own, word by word, and shares no code with the packers, so
that it can serve as the oracle of every kernel.
"""

from typing import Protocol

import ml_dtypes
import numpy as np

from pallas_kernels.pages import Geometry, RowLayout


class QuantizedLike(Protocol):
    """What :func:`block_pages` needs of a quantized matrix (``calib.anyprecision.QuantizedBlock`` has it)."""

    @property
    def codes(self) -> np.ndarray:
        """uint8[N, K] at the parent width."""
        ...

    @property
    def luts(self) -> dict[int, np.ndarray]:
        """float16[N/G, 2**b] of each width b."""
        ...

    @property
    def scales(self) -> np.ndarray:
        """float16[N]."""
        ...


def pack_planes(codes: np.ndarray, parent: int) -> np.ndarray:
    """Codes ``uint8[N, K]`` below ``2**parent`` to planes ``uint32[parent, N, ceil(K/32)]``, plane 0 the MSB.

    Bit c (LSB = 0) of word w is column ``32*w + c``; padding columns are zero. ValueError on a code too large.
    """
    codes = np.asarray(codes)
    if codes.dtype != np.uint8 or codes.ndim != 2:
        raise ValueError(f"codes must be uint8[N, K], got {codes.dtype}{list(codes.shape)}")
    if parent < 8 and codes.size and int(codes.max()) >= 1 << parent:
        raise ValueError(f"code {int(codes.max())} does not fit in {parent} planes")
    rows, cols = codes.shape
    padded = np.zeros((rows, -(-cols // 32) * 32), np.uint8)
    padded[:, :cols] = codes
    shifts = np.arange(parent - 1, -1, -1, dtype=np.uint8)[:, None, None]
    packed = np.packbits((padded[None] >> shifts) & 1, axis=-1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)


def unpack_planes(planes: np.ndarray, cols: int) -> np.ndarray:
    """Planes ``uint32[b, N, W]`` to codes ``uint8[N, cols]`` of ``b`` bits; inverse of :func:`pack_planes`."""
    planes = np.ascontiguousarray(planes, "<u4")
    bits = np.unpackbits(planes.view(np.uint8), axis=-1, count=cols, bitorder="little")
    codes = np.zeros(bits.shape[1:], np.uint8)
    for plane in bits:
        codes = (codes << 1) | plane
    return codes


def lut_records(scales: np.ndarray, lut: np.ndarray, lut_rows: int) -> np.ndarray:
    """Row scales ``float16[N]`` and centroids ``float16[N/G, 2**b]`` to LUT rows ``uint32[N/G, row_words]``.

    A record is G scales, padded with a zero to a whole word, then the centroids; the earlier value of a pair
    lies in the low half. ValueError where the shapes disagree.
    """
    groups = len(lut)
    if scales.shape != (groups * lut_rows,):
        raise ValueError(f"{groups} groups of {lut_rows} rows need {groups * lut_rows} scales, got {scales.shape}")
    head = np.zeros((groups, -(-lut_rows // 2) * 2), np.float16)
    head[:, :lut_rows] = np.asarray(scales, np.float16).reshape(groups, lut_rows)
    halves = np.concatenate([head, np.asarray(lut, np.float16)], axis=1)
    return _pair_halves(halves)


def split_lut_records(records: np.ndarray, lut_rows: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """LUT rows to ``(scales float16[N], lut float16[N/G, 2**bits])``; inverse of :func:`lut_records`."""
    halves = _split_halves(records).view(np.float16)
    head = -(-lut_rows // 2) * 2
    scales = np.ascontiguousarray(halves[:, :lut_rows]).reshape(-1)
    return scales, np.ascontiguousarray(halves[:, head : head + (1 << bits)])


def bf16_rows(weight: np.ndarray) -> np.ndarray:
    """Weights ``bfloat16[N, K]`` to ``uint32[N, ceil(K/2)]``: column 2i in the low half of word i."""
    weight = np.asarray(weight)
    if weight.dtype != ml_dtypes.bfloat16:
        raise ValueError(f"16-bit rows hold bfloat16, got {weight.dtype}; cast the weights first")
    rows, cols = weight.shape
    halves = np.zeros((rows, -(-cols // 2) * 2), weight.dtype)
    halves[:, :cols] = weight
    return _pair_halves(halves)


def split_bf16_rows(rows: np.ndarray, cols: int) -> np.ndarray:
    """16-bit rows to ``bfloat16[N, cols]``; inverse of :func:`bf16_rows`."""
    return np.ascontiguousarray(_split_halves(rows)[:, :cols]).view(ml_dtypes.bfloat16)


def rows_to_pages(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Rows ``uint32[layout.rows, row_words]`` to ``uint32[pages, page_words]``; unused words are zero."""
    if rows.shape != (layout.rows, layout.row_words):
        raise ValueError(f"layout needs rows of shape {(layout.rows, layout.row_words)}, got {rows.shape}")
    per_page, used = layout.rows_per_page, layout.rows_per_page * layout.row_words
    full = np.zeros((layout.pages * per_page, layout.row_words), np.uint32)
    full[: layout.rows] = rows
    pages = np.zeros((layout.pages, layout.page_words), np.uint32)
    pages[:, :used] = full.reshape(layout.pages, used)
    return pages


def pages_to_rows(pages: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Pages to ``uint32[layout.rows, row_words]``; inverse of :func:`rows_to_pages`."""
    if pages.shape != (layout.pages, layout.page_words):
        raise ValueError(f"layout needs pages of shape {(layout.pages, layout.page_words)}, got {pages.shape}")
    used = layout.rows_per_page * layout.row_words
    return np.ascontiguousarray(pages[:, :used]).reshape(-1, layout.row_words)[: layout.rows]


def block_pages(block: QuantizedLike, weight: np.ndarray | None, geometry: Geometry, matrix: int) -> np.ndarray:
    """All host pages of a block, ``uint32[host_block_pages(matrix), page_words]``, in the order of the geometry.

    ``weight`` is the original ``bfloat16[N, K]``; it may be None where the geometry has no fallback.
    ValueError where block, weight and geometry disagree.
    """
    shape = geometry.shape(matrix)
    if block.codes.shape != (shape.rows, shape.cols):
        raise ValueError(f"the geometry has a block of {(shape.rows, shape.cols)}, got codes {block.codes.shape}")
    plane_layout = geometry.plane_layout(matrix)
    parts = [rows_to_pages(plane, plane_layout) for plane in pack_planes(block.codes, geometry.parent)]
    for bits in geometry.widths:
        records = lut_records(block.scales, block.luts[bits], shape.lut_rows)
        parts.append(rows_to_pages(records, geometry.lut_layout(matrix, bits)))
    if geometry.fallback:
        if weight is None:
            raise ValueError("the geometry keeps 16-bit pages: the original weights are needed")
        parts.append(rows_to_pages(bf16_rows(weight), geometry.dense_layout(matrix)))
    return np.concatenate(parts)


def unpack_block(
    pages: np.ndarray, geometry: Geometry, matrix: int
) -> tuple[np.ndarray, dict[int, np.ndarray], np.ndarray]:
    """Codes ``uint8[N, K]``, tables ``{b: float16[N/G, 2**b]}`` and scales ``float16[N]`` of a block.

    From all of its host pages: the inverse of :func:`block_pages`, but for the 16-bit rows.
    """
    shape, layout = geometry.shape(matrix), geometry.plane_layout(matrix)
    end = geometry.parent * layout.pages
    planes = [pages_to_rows(part, layout) for part in np.split(pages[:end], geometry.parent)]
    luts, scales = {}, np.empty(0, np.float16)
    for bits in geometry.widths:
        layout = geometry.lut_layout(matrix, bits)
        start, end = end, end + layout.pages
        scales, luts[bits] = split_lut_records(pages_to_rows(pages[start:end], layout), shape.lut_rows, bits)
    return unpack_planes(np.stack(planes), shape.cols), luts, scales


def read_block(pages: np.ndarray, geometry: Geometry, matrix: int, bits: int) -> np.ndarray:
    """Weights ``float32[N, K]`` of a block at ``bits`` from all its host pages: the oracle of the kernels."""
    return decode_pages(pages[list(geometry.host_pages(matrix, bits))], geometry, matrix, bits)


def decode_pages(pages: np.ndarray, geometry: Geometry, matrix: int, bits: int) -> np.ndarray:
    """Weights ``float32[N, K]`` from just the pages of ``bits``, in the order of ``table_slots(matrix, bits)``.

    Slow and plain on purpose: every element is addressed by page and word, as the geometry's words say.
    """
    shape = geometry.shape(matrix)
    row, col = np.arange(shape.rows)[:, None], np.arange(shape.cols)[None, :]

    def word(first_page: int, row_words: int, record, index):
        per_page = geometry.page_words // row_words
        return pages[first_page + record // per_page, record % per_page * row_words + index]

    def half(value, which):
        return (value >> np.asarray(16 * which, np.uint32)).astype(np.uint16)

    if bits == 16:
        upper = half(word(0, shape.dense_row_words, row, col // 2), col % 2)
        return (upper.astype(np.uint32) << 16).view(np.float32)
    plane_pages = geometry.plane_layout(matrix).pages
    code = np.zeros((shape.rows, shape.cols), np.int64)
    for plane in range(bits):
        words = word(plane * plane_pages, shape.plane_row_words, row, col // 32)
        code = 2 * code + ((words >> (col % 32).astype(np.uint32)) & 1)
    lut_page, lut_words = bits * plane_pages, shape.lut_row_words(bits)
    group, member = row // shape.lut_rows, row % shape.lut_rows
    scale = half(word(lut_page, lut_words, group, member // 2), member % 2).view(np.float16)
    value = half(word(lut_page, lut_words, group, shape.scale_words + code // 2), code % 2).view(np.float16)
    return scale.astype(np.float32) * value.astype(np.float32)


def _pair_halves(halves: np.ndarray) -> np.ndarray:
    """16-bit values ``[n, 2m]`` to words ``uint32[n, m]``, the earlier value in the low half."""
    raw = np.ascontiguousarray(halves).view(np.uint16).astype(np.uint32)
    return raw[:, 0::2] | (raw[:, 1::2] << 16)


def _split_halves(words: np.ndarray) -> np.ndarray:
    """Words ``uint32[n, m]`` to ``uint16[n, 2m]``; inverse of :func:`_pair_halves`."""
    words = np.asarray(words, np.uint32)
    return np.stack([words & 0xFFFF, words >> 16], axis=-1).astype(np.uint16).reshape(len(words), -1)

"""Matrices of ``any-precision-llm`` packs: their bit planes and tables to our codes, exactly.

A pack stores a matrix [N, K] as ``qweight`` int32[parent, N, K/32], plane 0 the most significant bit of the codes, and
a table ``lut{b}`` float16[N, 2**b] for every width b from seed to parent. Words are those that a warp of its kernel
loads: within a block of 1024 columns, a word holds 4 bytes that lie a quarter of the block apart.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from calib.anyprecision import QuantizedBlock

BLOCK_COLS = 1024


def unpack_codes(qweight: np.ndarray) -> np.ndarray:
    """Codes uint8[N, K] of ``qweight`` int32[parent, N, K/32]."""
    words = np.ascontiguousarray(qweight).view(np.uint32)
    rows = words.shape[1]
    word, shift = _bit_addresses(32 * words.shape[2])
    codes = np.zeros((rows, len(word)), np.uint8)
    for plane in words:
        codes = (codes << 1) | ((plane[:, word] >> shift) & 1).astype(np.uint8)
    return codes


def _bit_addresses(cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Word int64[cols] of each column in a row of a plane, and how far its bit is shifted, uint32[cols]."""
    column = np.arange(cols)
    block, inside = np.divmod(column, BLOCK_COLS)
    # Words of the block: 32, fewer in a last block that is not full.
    lanes = np.minimum(cols - block * BLOCK_COLS, BLOCK_COLS) // 32
    quarter, rest = np.divmod(inside, 8 * lanes)
    return block * 32 + rest // 8, (8 * (3 - quarter) + 7 - rest % 8).astype(np.uint32)


def pack_block(parts: Sequence[tuple[np.ndarray, Mapping[int, np.ndarray]]]) -> QuantizedBlock:
    """One block of the rows of all ``parts``, each a ``(qweight, {b: lut})`` of the same K and widths.

    A table per row and scales of 1: every weight is exactly the pack's. Tables need not ascend. ValueError, with a
    sentence, where shapes disagree or a table is not finite.
    """
    codes, tables = [], []
    for qweight, luts in parts:
        parent, rows = max(luts), qweight.shape[1]
        if qweight.dtype != np.int32 or qweight.ndim != 3 or qweight.shape[0] != parent:
            raise ValueError(f"qweight must be int32[{parent}, N, K/32], got {qweight.dtype}{list(qweight.shape)}")
        for bits, lut in luts.items():
            if lut.dtype != np.float16 or lut.shape != (rows, 1 << bits):
                raise ValueError(f"lut{bits} must be float16[{rows}, {1 << bits}], got {lut.dtype}{list(lut.shape)}")
            if not np.isfinite(lut).all():
                raise ValueError(f"lut{bits} has values that are not finite")
        codes.append(unpack_codes(qweight))
        tables.append(luts)
    joined = {bits: np.concatenate([luts[bits] for luts in tables]) for bits in sorted(tables[0])}
    whole = np.concatenate(codes)
    return QuantizedBlock(whole, joined, np.ones(len(whole), np.float16))

"""The product of few rows in Triton's language: :mod:`.gpu_stream` without Pallas, of the same tiles and codes.

The functions of this module are kernel code, never called as they stand: :func:`compiled` binds the names of Triton's
language in them when it is first asked, so that the package imports without Triton. Capitals are constants of a
kernel; ``EMULATED`` writes out in plain operations what Triton's interpreter does not have.
"""

from __future__ import annotations

from functools import cache
from typing import Any

# Triton's language, once bound.
tl: Any = None


@cache
def compiled() -> Any:
    """The kernel :func:`stream`, as Triton compiles and launches it. ImportError without Triton."""
    import triton
    import triton.language

    names = globals()
    names["tl"] = triton.language
    for name in ("_page", "_half", "_permute", "_compose", "_pick", "_add", "_picked", "_gathered", "_dense", "_store"):
        names[name] = triton.jit(names[name])
    for name in ("_tile", "stream"):
        names[name] = triton.jit(names[name])
    return names["stream"]


def stream(
    expert_ptr, used_ptr, source_ptr, x_ptr, arena_ptr, bits_ptr, pages_ptr, out_ptr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, X_WORDS: tl.constexpr, MATRIX: tl.constexpr,
    OUTPUTS: tl.constexpr, SLOTS: tl.constexpr, PAGE_WORDS: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    FALLBACK: tl.constexpr, LUT_ROWS: tl.constexpr, PLANE_WORDS: tl.constexpr, DENSE_WORDS: tl.constexpr,
    REGISTER_BITS: tl.constexpr, GELU: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """One tile of outputs of one tile of choices: each precision has a body of its own.

    Pointers as the inputs of :func:`pallas_kernels.expert_ffn.gpu_stream.streamed`; ``out`` float32[tiles, m, N].
    """
    at = tl.program_id(0)
    if at < tl.load(used_ptr):
        expert = tl.load(expert_ptr + at)
        bits = tl.load(bits_ptr + 2 * expert + MATRIX)
        table = pages_ptr + (2 * expert + MATRIX) * SLOTS
        for width in tl.static_range(LOWEST, HIGHEST + 1):
            if bits == width:
                _tile(at, table, source_ptr, x_ptr, arena_ptr, out_ptr, width, TOKENS, ROWS, WORDS, X_WORDS, MATRIX,
                      OUTPUTS, PAGE_WORDS, HIGHEST, LUT_ROWS, PLANE_WORDS, DENSE_WORDS, REGISTER_BITS, GELU,
                      EMULATED)  # fmt: skip
        if FALLBACK:
            if bits == 16:
                _tile(at, table, source_ptr, x_ptr, arena_ptr, out_ptr, 16, TOKENS, ROWS, WORDS, X_WORDS, MATRIX,
                      OUTPUTS, PAGE_WORDS, HIGHEST, LUT_ROWS, PLANE_WORDS, DENSE_WORDS, REGISTER_BITS, GELU,
                      EMULATED)  # fmt: skip


def _tile(
    at, table, source_ptr, x_ptr, arena_ptr, out_ptr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, X_WORDS: tl.constexpr, MATRIX: tl.constexpr,
    OUTPUTS: tl.constexpr, PAGE_WORDS: tl.constexpr, HIGHEST: tl.constexpr, LUT_ROWS: tl.constexpr,
    PLANE_WORDS: tl.constexpr, DENSE_WORDS: tl.constexpr, REGISTER_BITS: tl.constexpr, GELU: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 2 - MATRIX
    COLUMNS: tl.constexpr = ROWS // HALVES
    first = tl.program_id(1) * COLUMNS
    # Gate rows, then the up rows of the same columns; past the last column that one again.
    row = tl.arange(0, ROWS)[:, None]
    rows = row // COLUMNS * OUTPUTS + tl.minimum(first + row % COLUMNS, OUTPUTS - 1)
    lane = tl.arange(0, WORDS)[None, :]
    x = ()
    for t in tl.static_range(TOKENS):
        x = x + (x_ptr + tl.load(source_ptr + at * TOKENS + t) * (32 * X_WORDS),)
    sums = (tl.zeros((ROWS, WORDS), tl.float32),) * TOKENS
    scale = 1.0

    if BITS == 16:
        PER_PAGE: tl.constexpr = PAGE_WORDS // DENSE_WORDS
        start = _page(arena_ptr, table, rows // PER_PAGE, PAGE_WORDS) + rows % PER_PAGE * DENSE_WORDS
        for i in range(0, PLANE_WORDS, WORDS):
            sums = _dense(sums, x, i + lane, start, X_WORDS, DENSE_WORDS)
    else:
        PER_PAGE: tl.constexpr = PAGE_WORDS // PLANE_WORDS
        PAGES: tl.constexpr = (HALVES * OUTPUTS + PER_PAGE - 1) // PER_PAGE
        planes = ()
        for p in tl.static_range(BITS):
            page = _page(arena_ptr, table, p * PAGES + rows // PER_PAGE, PAGE_WORDS)
            planes = planes + (page + rows % PER_PAGE * PLANE_WORDS,)
        SCALE_WORDS: tl.constexpr = (LUT_ROWS + 1) // 2
        LUT_WORDS: tl.constexpr = SCALE_WORDS + (1 << BITS) // 2
        LUTS: tl.constexpr = PAGE_WORDS // LUT_WORDS
        group = rows // LUT_ROWS
        page = _page(arena_ptr, table, HIGHEST * PAGES + group // LUTS, PAGE_WORDS)
        lut = page + group % LUTS * LUT_WORDS
        member = rows % LUT_ROWS
        scale = _half(tl.load(lut + member // 2) >> (member % 2 * 16).to(tl.uint32))
        lut += SCALE_WORDS
        if BITS <= REGISTER_BITS:
            low, high = (), ()
            for i in tl.static_range((1 << BITS) // 4):
                a, b = tl.load(lut + 2 * i), tl.load(lut + 2 * i + 1)
                low = low + (_permute(a, b, 0x6420, EMULATED),)
                high = high + (_permute(a, b, 0x7531, EMULATED),)
            for i in range(0, PLANE_WORDS, WORDS):
                word = i + lane
                bits = [tl.load(plane + tl.minimum(word, PLANE_WORDS - 1)) for plane in planes]
                sums = _picked(sums, x, word, bits, low, high, BITS, X_WORDS, EMULATED)
        else:
            for i in range(0, PLANE_WORDS, WORDS):
                word = i + lane
                bits = [tl.load(plane + tl.minimum(word, PLANE_WORDS - 1)) for plane in planes]
                sums = _gathered(sums, x, word, bits, lut, BITS, X_WORDS)

    for t in tl.static_range(TOKENS):
        _store(out_ptr + (at * TOKENS + t) * OUTPUTS, first, tl.sum(sums[t], 1, keep_dims=True) * scale,
               COLUMNS, HALVES, OUTPUTS, GELU)  # fmt: skip


def _page(arena_ptr, table, slot, PAGE_WORDS: tl.constexpr):
    """First words of the pages in table slots. Arenas have more words than 32 bits can count."""
    return arena_ptr + tl.load(table + slot).to(tl.int64) * PAGE_WORDS


def _half(word):
    """float32 of the float16 in the low half of a word."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


def _permute(a, b, order, EMULATED: tl.constexpr):
    """PRMT: byte ``i`` of the result is the byte of ``b:a`` that nibble ``i`` of ``order`` (below 8) names."""
    if not EMULATED:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, order], tl.uint32, True, 1)
    # The bytes of a word side by side.
    byte = tl.arange(0, 4)[None, None, :].to(tl.uint32)
    order = (order + tl.zeros_like(a + b))[:, :, None]
    name = (order >> (4 * byte)) & 7
    word = tl.where(name < 4, a[:, :, None], b[:, :, None])
    return tl.sum(((word >> ((name & 3) * 8)) & 0xFF) << (8 * byte), 2)


def _compose(planes, FIRST: tl.constexpr, LAST: tl.constexpr, shift, MASK: tl.constexpr):
    """Codes, of planes FIRST to LAST, of the columns that MASK leaves after ``shift``: each at its bit of the mask."""
    code = (planes[FIRST] >> shift) & MASK
    for p in tl.static_range(FIRST + 1, LAST):
        code = (code << 1) | ((planes[p] >> shift) & MASK)
    return code


def _add(sums, x, word, column, value, X_WORDS: tl.constexpr):
    """Sums of every token with one column of each word added; activations are zeros past the row's end."""
    out = ()
    for t in tl.static_range(len(sums)):
        out = out + (sums[t] + value * tl.load(x[t] + column * X_WORDS + word),)
    return out


def _pick(pool, selectors, shift, EMULATED: tl.constexpr):
    """One byte for each of four columns: the first selector picks from each eight, every other halves what is left."""
    if len(pool) == 1:
        pool = pool + pool
    for s in tl.static_range(len(selectors)):
        picked = ()
        for i in tl.static_range(len(pool) // 2):
            picked = picked + (_permute(pool[2 * i], pool[2 * i + 1], selectors[s] >> shift, EMULATED),)
        pool = picked
    return pool[0]


def _picked(sums, x, word, planes, low, high, BITS: tl.constexpr, X_WORDS: tl.constexpr, EMULATED: tl.constexpr):
    """Tables in registers: codes lie in nibbles, which PRMT selects bytes by, low and high ones apart."""
    LAST: tl.constexpr = BITS - 3 if BITS > 3 else 0
    for s in range(4):
        selectors = (_compose(planes, LAST, BITS, s, 0x11111111),)
        for p in tl.static_range(LAST):
            bit = _compose(planes, LAST - 1 - p, LAST - p, s, 0x11111111)
            selectors = selectors + ((bit << 2) | 0x32103210,)
        for h in tl.static_range(2):
            a = _pick(low, selectors, 16 * h, EMULATED)
            b = _pick(high, selectors, 16 * h, EMULATED)
            for p in tl.static_range(2):
                both = _permute(a, b, 0x5140 + 0x2222 * p, EMULATED)
                for i in tl.static_range(2):
                    sums = _add(sums, x, word, 16 * h + 8 * p + 4 * i + s, _half(both >> (16 * i)), X_WORDS)
    return sums


def _gathered(sums, x, word, planes, lut, BITS: tl.constexpr, X_WORDS: tl.constexpr):
    """A word of two centroids for each column: planes but the last say which, the last one which half."""
    for q in range(4):
        for h in tl.static_range(2):
            s = 2 * q + h
            index = _compose(planes, 0, BITS - 1, s, 0x01010101)
            half = _compose(planes, BITS - 1, BITS, s, 0x01010101) << 4
            for byte in tl.static_range(4):
                both = tl.load(lut + ((index >> (8 * byte)) & 0xFF).to(tl.int32))
                value = _half(both >> ((half >> (8 * byte)) & 0xFF))
                sums = _add(sums, x, word, 8 * byte + s, value, X_WORDS)
    return sums


def _dense(sums, x, word, start, X_WORDS: tl.constexpr, DENSE_WORDS: tl.constexpr):
    """Two bfloat16 weights a word."""
    for s in range(4):
        for i in tl.static_range(4):
            both = tl.load(start + tl.minimum(16 * word + 4 * s + i, DENSE_WORDS - 1))
            for h in tl.static_range(2):
                value = ((both >> (16 * h)) << 16).to(tl.float32, bitcast=True)
                sums = _add(sums, x, word, 8 * s + 2 * i + h, value, X_WORDS)
    return sums


def _store(
    out_ptr, first, total, COLUMNS: tl.constexpr, HALVES: tl.constexpr, OUTPUTS: tl.constexpr, GELU: tl.constexpr
):
    """Sums of a token's rows; of gate and up rows, ``activation(gate) * up``."""
    if HALVES == 2:
        gate, up = tl.split(tl.trans(tl.reshape(total, (2, COLUMNS))))
        # GELU's tanh as a sigmoid of twice its argument.
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
        result = gate * tl.sigmoid(steep) * up
    else:
        result = tl.reshape(total, (COLUMNS,))
    own = first + tl.arange(0, COLUMNS)
    tl.store(out_ptr + own, result, mask=own < OUTPUTS)

"""Weights of a block inside a Pallas kernel: tiles of rows, read through the page table and decoded in registers.

A tile is ``rows`` rows by some words of 32 columns. A thread holds whole words of every plane, so all shifts that
take a word apart are constants and no value moves between threads. Columns come in an order that is cheap to make;
activations are stored ``[..., 32, words]`` (:func:`.gpu_ffn.by_column`), so that any order reads them in whole lines.

Codes become values in one of two ways. Where the table of a row fits in registers, PRMT instructions pick its bytes,
four columns at a time; otherwise each column gathers a word of two centroids from the LUT page.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.pages import Geometry, RowLayout, ceil_div

# ``use(carry, word, column, value)``: folds the values of one column of each word, float32[rows, words], into a carry.
Use = Callable[[Any, Any, Any, jax.Array], Any]


class Weights(NamedTuple):
    """One matrix of every expert of a layer: the arrays of the op, or a kernel's references to them.

    ``arena`` uint32[num_pages, page_words], ``bits`` int32[E, 2], ``pages`` int32[E, 2, S].
    """

    arena: Any
    bits: Any
    pages: Any


def by_bits(bits: jax.Array, geometry: Geometry, run: Callable[[int], Any]) -> Any:
    """``run(b)`` for the ``bits`` int32[] that a block has: each precision has a branch of its own."""
    branches = [partial(run, b) for b in geometry.all_bits]
    index = jnp.where(bits == 16, len(geometry.widths), bits - geometry.widths[0])
    return lax.switch(jnp.clip(index, 0, len(branches) - 1), branches)


@dataclass(frozen=True)
class Tile:
    """Some rows of one block, as a kernel sees it.

    ``expert`` int32[]; ``rows`` int32[R, 1], all in range; ``register_bits``: widths up to it keep the table in
    registers. ``interpret``: emulate what only a GPU has.
    """

    weights: Weights
    expert: jax.Array
    geometry: Geometry
    matrix: int
    rows: jax.Array
    register_bits: int
    interpret: bool

    def fold(self, bits: int, words: int, init: Any, use: Use) -> tuple[jax.Array, Any]:
        """``use(carry, word, column, value)`` for every column of every word: ``(row scales float32[R, 1], carry)``.

        ``words`` at a time; ``word`` int32[1, words] may run past the row's end, where values are of the last word.
        """
        scale, read = self._dense() if bits == 16 else self._quantized(bits)
        end = self.geometry.shape(self.matrix).plane_row_words
        lane = lax.broadcasted_iota(jnp.int32, (1, words), 1)

        def step(i, carry):
            word = i * words + lane
            return read(jnp.minimum(word, end - 1), carry, lambda carry, *column: use(carry, word, *column))

        return scale, lax.fori_loop(0, ceil_div(end, words), step, init)

    def _place(self, layout: RowLayout, record: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Table slot, counted from the layout's first, and first word of records ``int32[R, 1]``."""
        per_page = jnp.int32(layout.rows_per_page)
        return lax.div(record, per_page), lax.rem(record, per_page) * layout.row_words

    def _page(self, slot: jax.Array) -> jax.Array:
        return self.weights.pages[self.expert, self.matrix, slot]

    def _word(self, page: jax.Array, word: jax.Array) -> jax.Array:
        shape = jnp.broadcast_shapes(page.shape, word.shape)
        return plgpu.load(self.weights.arena.at[jnp.broadcast_to(page, shape), jnp.broadcast_to(word, shape)])

    def _repeat(self, count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """``body(i, carry)``, unrolled where machine code is made, so that ``i`` is a constant there.

        Outside of it a quarter of the columns is a turn of a loop: the time that Triton takes to compile grows with
        the square of the memory accesses in a kernel.
        """
        if self.interpret:
            return lax.fori_loop(0, count, body, carry)
        for i in range(count):
            carry = body(i, carry)
        return carry

    def _dense(self):
        """Two columns a word; values are the weights themselves."""
        layout = self.geometry.dense_layout(self.matrix)
        slot, start = self._place(layout, self.rows)
        page = self._page(slot)

        def read(word, carry, use):
            def quarter(s, carry):
                def pair(i, carry):
                    i = 4 * s + i
                    both = self._word(page, start + jnp.minimum(16 * word + i, layout.row_words - 1))

                    def half(j, carry):
                        return use(carry, 2 * i + j, lax.bitcast_convert_type(_shift(both, 16 * j) << 16, jnp.float32))

                    return self._repeat(2, half, carry)

                return self._repeat(4, pair, carry)

            return lax.fori_loop(0, 4, quarter, carry)

        return jnp.ones(self.rows.shape, jnp.float32), read

    def _quantized(self, bits: int):
        """Planes and the table of one width; values are centroids."""
        shape, layout = self.geometry.shape(self.matrix), self.geometry.plane_layout(self.matrix)
        slot, start = self._place(layout, self.rows)
        pages = [self._page(plane * layout.pages + slot) for plane in range(bits)]
        lut_rows, lut = jnp.int32(shape.lut_rows), self.geometry.lut_layout(self.matrix, bits)
        slot, head = self._place(lut, lax.div(self.rows, lut_rows))
        lut_page, member = self._page(self.geometry.lut_slot(self.matrix) + slot), lax.rem(self.rows, lut_rows)
        scale = _half(self._word(lut_page, head + (member >> 1)) >> ((member & 1) << 4).astype(jnp.uint32))
        table = lambda index: self._word(lut_page, head + shape.scale_words + index)  # noqa: E731
        decode = (self._picker if bits <= self.register_bits else self._gatherer)(bits, table)

        def read(word, carry, use):
            return decode([self._word(page, start + word) for page in pages], carry, use)

        return scale, read

    def _gatherer(self, bits: int, table: Callable):
        """A word of two centroids for each column: planes but the last say which, the last one which half."""

        def decode(planes, carry, use):
            def quarter(q, carry):
                def eighth(h, carry):
                    s = 2 * q + h
                    index = _compose(planes[:-1], s, 0x01010101)
                    half = _compose(planes[-1:], s, 0x01010101) << 4

                    def one(byte, carry):
                        both = table((_shift(index, 8 * byte) & 0xFF).astype(jnp.int32))
                        return use(carry, 8 * byte + s, _half(both >> (_shift(half, 8 * byte) & 0xFF)))

                    return self._repeat(4, one, carry)

                return self._repeat(2, eighth, carry)

            return lax.fori_loop(0, 4, quarter, carry)

        return decode

    def _picker(self, bits: int, table: Callable):
        """The table's bytes in registers, low ones and high ones apart; codes lie in nibbles, which PRMT selects by.

        The last three planes pick from each eight centroids, every plane before them halves what was picked.
        """
        words = [table(jnp.full(self.rows.shape, i, jnp.int32)) for i in range(1 << (bits - 1))]
        pools = [
            [self._permute(a, b, order) for a, b in zip(words[0::2], words[1::2], strict=True)]
            for order in (0x6420, 0x7531)
        ]

        def pick(pool, selectors):
            pool = pool if len(pool) > 1 else pool * 2
            for selector in selectors:
                pool = [self._permute(a, b, selector) for a, b in zip(pool[0::2], pool[1::2], strict=True)]
            return pool[0]

        def decode(planes, carry, use):
            def quarter(s, carry):
                nibbles = [_compose(planes[-3:], s, 0x11111111)]
                nibbles += [_compose([plane], s, 0x11111111) << 2 | jnp.uint32(0x32103210) for plane in planes[-4::-1]]

                def half(h, carry):
                    low, high = (pick(pool, [_shift(n, 16 * h) for n in nibbles]) for pool in pools)

                    def pair(p, carry):
                        both = self._permute(low, high, 0x5140 + 0x2222 * p)

                        def one(i, carry):
                            return use(carry, 16 * h + 8 * p + 4 * i + s, _half(_shift(both, 16 * i)))

                        return self._repeat(2, one, carry)

                    return self._repeat(2, pair, carry)

                return self._repeat(2, half, carry)

            return lax.fori_loop(0, 4, quarter, carry)

        return decode

    def _permute(self, a: jax.Array, b: jax.Array, order: Any) -> jax.Array:
        """PRMT: byte ``i`` of the result is the byte of ``b:a`` that nibble ``i`` of ``order`` (below 8) names."""
        args = [a, b, order] if getattr(order, "ndim", 0) else [a, b]
        shape = jnp.broadcast_shapes(*(arg.shape for arg in args))
        args = [jnp.broadcast_to(arg, shape) for arg in args]
        if self.interpret:
            return _permute_emulated(args[0], args[1], order)
        last = "$3" if len(args) == 3 else f"0x{order:04x}"
        [out] = plgpu.elementwise_inline_asm(
            f"prmt.b32 $0, $1, $2, {last};",
            args=args,
            constraints="=r" + ",r" * len(args),
            pack=1,
            # An unsigned result would be lowered to a type that MLIR does not have there.
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
        )
        return out.astype(jnp.uint32)


def _permute_emulated(a: jax.Array, b: jax.Array, order: Any) -> jax.Array:
    place = 4 * lax.broadcasted_iota(jnp.uint32, (*a.shape, 4), a.ndim)
    name = _shift(jnp.broadcast_to(jnp.asarray(order, jnp.uint32)[..., None], place.shape), place)
    byte = (jnp.where((name & 4) == 0, a[..., None], b[..., None]) >> ((name & 3) << 3)) & 0xFF
    return jnp.sum(byte << (2 * place), -1, dtype=jnp.uint32)


def _shift(word: jax.Array, by: Any) -> jax.Array:
    """``word >> by``, in zeros."""
    return lax.shift_right_logical(word, jnp.broadcast_to(jnp.asarray(by, jnp.uint32), word.shape))


def _compose(planes: list[jax.Array], shift: Any, mask: int) -> jax.Array:
    """Codes of the columns that ``mask`` leaves after ``shift``, each at its bit of the mask."""
    code = jnp.zeros(planes[0].shape, jnp.uint32)
    for plane in planes:
        code = (code << 1) | (_shift(plane, shift) & jnp.uint32(mask))
    return code


def _half(word: jax.Array) -> jax.Array:
    """float32 of the float16 in the low half of a word."""
    return lax.bitcast_convert_type(word.astype(jnp.uint16), jnp.float16).astype(jnp.float32)

"""Expert feed-forward in plain XLA: the oracle of every other backend, and the trainable dense form.

Both forms use the same grouping and the same per-tile products, so paged at 16 bits equals dense.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.grouping import Groups, combine, group
from pallas_kernels.linear.reference import widen
from pallas_kernels.pages import Geometry, RowLayout


def tile_rows(choices: int, experts: int) -> int:
    """Rows of a tile: about one expert's even share of the choices, a power of two from 8 to 512."""
    share = max(1, choices // experts)
    return min(512, max(8, 1 << (share - 1).bit_length()))


# Activations by the name that model configs give them.
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


def _ffn(x: jax.Array, gate_up: jax.Array, down: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    """Gated MLP of rows ``x`` [..., m, H]; returns the output and the input of ``down``."""
    gate, up = jnp.split(jnp.einsum("...mh,...fh->...mf", x, gate_up), 2, axis=-1)
    inner = ACTIVATIONS[activation](gate) * up
    return jnp.einsum("...mf,...hf->...mh", inner, down), inner


def _gather_rows(x: jax.Array, groups: Groups, k: int) -> jax.Array:
    """Tile inputs [tiles, m, H]; padding rows repeat token 0 and are never read back."""
    token = jnp.where(groups.choice < x.shape[0] * k, groups.choice // k, 0)
    return x[token]


def dense_expert_ffn(
    x: jax.Array,
    experts_of: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    activation: str = "silu",
) -> jax.Array:
    """Expert feed-forward with whole weights, differentiable.

    ``x`` float32[T, H], ``experts_of`` int32[T, k], ``gates`` float32[T, k], ``valid`` bool[T],
    ``gate_up`` [E, 2I, H], ``down`` [E, H, I], ``activation`` a name in ``ACTIVATIONS``; returns float32[T, H].
    Weights given as uint16, the bits of bfloat16, are widened tile by tile, never all at once; they have no gradient.
    """
    groups = group(experts_of, valid, gate_up.shape[0], tile_rows(experts_of.size, gate_up.shape[0]))
    rows = _gather_rows(x, groups, experts_of.shape[1])
    if gate_up.dtype == jnp.uint16:
        return combine(_tile_by_tile(rows, groups, gate_up, down, activation), groups, gates)
    out, _ = _ffn(rows, gate_up[groups.expert].astype(x.dtype), down[groups.expert].astype(x.dtype), activation)
    return combine(out, groups, gates)


def _tile_by_tile(
    rows: jax.Array, groups: Groups, gate_up: jax.Array, down: jax.Array, activation: str
) -> jax.Array:
    """Outputs [tiles, m, H] with the weights of one tile in float32 at a time, in the backward pass too."""

    @jax.checkpoint
    def tile(item):
        index, expert, row = item

        def run(row):
            return _ffn(row, widen(gate_up[expert]), widen(down[expert]), activation)[0]

        return lax.cond(index < groups.used, run, jnp.zeros_like, row)

    return lax.map(tile, (jnp.arange(len(rows)), groups.expert, rows))


def _read_rows(arena: jax.Array, page_ids: jax.Array, layout: RowLayout) -> jax.Array:
    """Rows uint32[..., rows, row_words] of the payloads in pages ``page_ids`` int32[..., pages]."""
    words = arena[page_ids, : layout.rows_per_page * layout.row_words]
    return words.reshape(*page_ids.shape[:-1], -1, layout.row_words)[..., : layout.rows, :]


def _bf16_pairs(words: jax.Array) -> jax.Array:
    """float32[..., 2n] from words that hold bfloat16 pairs, low half first."""
    low, high = words << 16, words & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(jnp.stack([low, high], -1), jnp.float32).reshape(*words.shape[:-1], -1)


def _f16_pairs(words: jax.Array) -> jax.Array:
    """float32[..., 2n] from words that hold float16 pairs, low half first."""
    halves = lax.bitcast_convert_type(words, jnp.float16)
    return halves.astype(jnp.float32).reshape(*words.shape[:-1], -1)


def _dense_block(arena: jax.Array, slots: jax.Array, geometry: Geometry, matrix: int) -> jax.Array:
    """Weights of a block that is committed at 16 bits."""
    layout = geometry.dense_layout(matrix)
    return _bf16_pairs(_read_rows(arena, slots[: layout.pages], layout))[:, : geometry.shape(matrix).cols]


def _quantized_block(arena: jax.Array, slots: jax.Array, bits: jax.Array, geometry: Geometry, matrix: int) -> jax.Array:
    """Weights of a block at any quantized width.

    One form for all widths, so that a program does not grow with the ladder: planes that are not resident read as
    zeros from the null page and are shifted out again, and the LUT is read at the place its width gives it.
    """
    shape, plane = geometry.shape(matrix), geometry.plane_layout(matrix)
    # Under vmap both forms of a block are read and one is chosen: 16 bits must not break the other.
    bits = jnp.minimum(bits, geometry.parent)
    shift = jnp.arange(32, dtype=jnp.uint32)
    code = jnp.zeros((shape.rows, plane.row_words, 32), jnp.uint32)
    for words in _read_rows(arena, slots[: geometry.lut_slot(matrix)].reshape(geometry.parent, -1), plane):
        code = (code << 1) | ((words[:, :, None] >> shift) & 1)
    code = code.reshape(shape.groups, -1, plane.row_words * 32)[..., : shape.cols].reshape(shape.groups, -1)
    code = (code >> (geometry.parent - bits).astype(jnp.uint32)).astype(jnp.int32)

    row_words = shape.scale_words + (1 << bits) // 2
    per_page = geometry.page_words // row_words
    row = jnp.arange(shape.groups)
    page = slots[geometry.lut_slot(matrix) + row // per_page]
    # Words past the end of a narrower LUT are never asked for by a code.
    word = (row % per_page * row_words)[:, None] + jnp.arange(shape.lut_row_words(geometry.parent))
    record = arena[page[:, None], jnp.minimum(word, geometry.page_words - 1)]
    scale = _f16_pairs(record[:, : shape.scale_words])[:, : shape.lut_rows].reshape(shape.rows, 1)
    lut = _f16_pairs(record[:, shape.scale_words :])
    return jnp.take_along_axis(lut, code, axis=1, mode="promise_in_bounds").reshape(shape.rows, shape.cols) * scale


def read_block(arena: jax.Array, slots: jax.Array, bits: jax.Array, geometry: Geometry, matrix: int) -> jax.Array:
    """Weights float32[rows, cols] of a block at ``bits`` int32[], from its table ``slots`` int32[S].

    A real branch outside of vmap: 16 bits and quantized widths are read by different code.
    """
    if not geometry.fallback:
        return _quantized_block(arena, slots, bits, geometry, matrix)
    return lax.cond(
        bits == 16,
        lambda: _dense_block(arena, slots, geometry, matrix),
        lambda: _quantized_block(arena, slots, bits, geometry, matrix),
    )


def paged_expert_ffn(
    x: jax.Array,
    experts_of: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    arena: jax.Array,
    bits: jax.Array,
    pages: jax.Array,
    geometry: Geometry,
    activation: str = "silu",
    moments: bool = False,
) -> tuple[jax.Array, ...]:
    """Expert feed-forward with weights read through one layer of the page table.

    ``arena`` uint32[num_pages, page_words], ``bits`` int32[E, 2], ``pages`` int32[E, 2, S]; the rest as in
    :func:`dense_expert_ffn`. Returns ``(y, stats)``: float32[T, H] and float32[T, k, 2], the squared
    norms of what ``gate_up`` and ``down`` read for each choice (0 for masked tokens); with ``moments`` a third,
    ``(float32[E, H], float32[E, I])``: sums of ``gate^2 * input^2`` over the tokens of an expert.
    """
    k = experts_of.shape[1]
    groups = group(experts_of, valid, bits.shape[0], tile_rows(experts_of.size, bits.shape[0]))
    rows = _gather_rows(x, groups, k)
    # Padding rows read token 0, and weigh nothing.
    weights = jnp.pad(gates.reshape(-1) ** 2, (0, 1))[groups.choice] if moments else None

    def tile(_, item):
        index, expert, row, weight = item

        def run():
            gate_up = read_block(arena, pages[expert, 0], bits[expert, 0], geometry, 0)
            down = read_block(arena, pages[expert, 1], bits[expert, 1], geometry, 1)
            out, inner = _ffn(row, gate_up, down, activation)
            sums = None if weight is None else (weight @ (row * row), weight @ (inner * inner))
            return out, jnp.sum(inner * inner, -1), sums

        def skip():
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run))

        return None, lax.cond(index < groups.used, run, skip)

    steps = jnp.arange(groups.expert.shape[0])
    # The checkpoint acts in a backward only: one tile's weights at a time are dequantized, never all of them kept.
    items = steps, groups.expert, rows, weights
    _, (out, inner_norm, sums) = lax.scan(jax.checkpoint(tile, prevent_cse=False), None, items)
    inside = groups.slot < inner_norm.size
    inner_norm = jnp.where(inside, inner_norm.reshape(-1)[jnp.where(inside, groups.slot, 0)], 0.0)
    outer_norm = jnp.where(inside, jnp.sum(x * x, -1)[:, None], 0.0)
    found = combine(out, groups, gates), jnp.stack([outer_norm, inner_norm], -1)
    if not moments:
        return found
    by_expert = lambda a: jnp.zeros((bits.shape[0], a.shape[1]), a.dtype).at[groups.expert].add(a)  # noqa: E731
    return *found, jax.tree.map(by_expert, sums)

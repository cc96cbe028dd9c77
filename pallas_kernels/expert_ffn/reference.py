"""Expert feed-forward in plain XLA: the oracle of every other backend, and the trainable dense form.

Both forms use the same grouping and the same per-tile products, so paged at 16 bits equals dense.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.grouping import Groups, combine, group
from pallas_kernels.pages import Geometry, RowLayout


def tile_rows(choices: int, experts: int) -> int:
    """Rows of a tile: about one expert's even share of the choices, a power of two from 8 to 512."""
    share = max(1, choices // experts)
    return min(512, max(8, 1 << (share - 1).bit_length()))


def _ffn(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    """SwiGLU of rows ``x`` [..., m, H]; returns the output and the input of ``down``."""
    gate, up = jnp.split(jnp.einsum("...mh,...fh->...mf", x, gate_up), 2, axis=-1)
    inner = jax.nn.silu(gate) * up
    return jnp.einsum("...mf,...hf->...mh", inner, down), inner


def _gather_rows(x: jax.Array, groups: Groups, k: int) -> jax.Array:
    """Tile inputs [tiles, m, H]; padding rows repeat token 0 and are never read back."""
    token = jnp.where(groups.choice < x.shape[0] * k, groups.choice // k, 0)
    return x[token]


def dense_expert_ffn(
    x: jax.Array, experts_of: jax.Array, gates: jax.Array, valid: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Expert feed-forward with whole weights, differentiable.

    ``x`` float32[T, H], ``experts_of`` int32[T, k], ``gates`` float32[T, k], ``valid`` bool[T],
    ``gate_up`` [E, 2I, H], ``down`` [E, H, I]; returns float32[T, H].
    """
    groups = group(experts_of, valid, gate_up.shape[0], tile_rows(experts_of.size, gate_up.shape[0]))
    rows = _gather_rows(x, groups, experts_of.shape[1])
    out, _ = _ffn(rows, gate_up[groups.expert].astype(x.dtype), down[groups.expert].astype(x.dtype))
    return combine(out, groups, gates)


def _read_rows(arena: jax.Array, page_ids: jax.Array, layout: RowLayout) -> jax.Array:
    """Rows uint32[rows, row_words] of the payload in pages ``page_ids`` int32[pages]."""
    words = arena[page_ids, : layout.rows_per_page * layout.row_words]
    return words.reshape(-1, layout.row_words)[: layout.rows]


def _bf16_pairs(words: jax.Array) -> jax.Array:
    """float32[..., 2n] from words that hold bfloat16 pairs, low half first."""
    low, high = words << 16, words & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(jnp.stack([low, high], -1), jnp.float32).reshape(*words.shape[:-1], -1)


def _f16_pairs(words: jax.Array) -> jax.Array:
    """float32[..., 2n] from words that hold float16 pairs, low half first."""
    halves = lax.bitcast_convert_type(words, jnp.float16)
    return halves.astype(jnp.float32).reshape(*words.shape[:-1], -1)


def read_block(arena: jax.Array, slots: jax.Array, geometry: Geometry, matrix: int, bits: int) -> jax.Array:
    """Weights float32[rows, cols] of a block at static ``bits``, from its table ``slots`` int32[S]."""
    shape = geometry.shape(matrix)
    if bits == 16:
        layout = geometry.dense_layout(matrix)
        return _bf16_pairs(_read_rows(arena, slots[: layout.pages], layout))[:, : shape.cols]
    plane = geometry.plane_layout(matrix)
    shift = jnp.arange(32, dtype=jnp.uint32)
    code = jnp.zeros((shape.rows, plane.row_words, 32), jnp.uint32)
    for j in range(bits):
        words = _read_rows(arena, slots[j * plane.pages : (j + 1) * plane.pages], plane)
        code = (code << 1) | ((words[:, :, None] >> shift) & 1)
    code = code.reshape(shape.rows, -1)[:, : shape.cols].astype(jnp.int32)
    layout = geometry.lut_layout(matrix, bits)
    first = geometry.lut_slot(matrix)
    record = _read_rows(arena, slots[first : first + layout.pages], layout)
    scale = _f16_pairs(record[:, : shape.scale_words])[:, : shape.lut_rows].reshape(shape.rows, 1)
    lut = _f16_pairs(record[:, shape.scale_words :])
    code = code.reshape(shape.groups, -1)
    return jnp.take_along_axis(lut, code, axis=1, mode="promise_in_bounds").reshape(shape.rows, shape.cols) * scale


def _switch_block(arena, bits, slots, geometry: Geometry, matrix: int) -> jax.Array:
    """Weights of a block at traced ``bits``; a real branch outside of vmap."""
    widths = jnp.asarray(geometry.all_bits)
    branches = [lambda s, b=b: read_block(arena, s, geometry, matrix, b) for b in geometry.all_bits]
    return lax.switch(jnp.searchsorted(widths, bits), branches, slots)


def paged_expert_ffn(
    x: jax.Array,
    experts_of: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    arena: jax.Array,
    bits: jax.Array,
    pages: jax.Array,
    geometry: Geometry,
) -> tuple[jax.Array, jax.Array]:
    """Expert feed-forward with weights read through one layer of the page table.

    ``arena`` uint32[num_pages, page_words], ``bits`` int32[E, 2], ``pages`` int32[E, 2, S]; the rest as in
    :func:`dense_expert_ffn`. Returns ``(y, stats)``: float32[T, H] and float32[T, k, 2], the squared
    norms of what ``gate_up`` and ``down`` read for each choice (0 for masked tokens).
    """
    k = experts_of.shape[1]
    groups = group(experts_of, valid, bits.shape[0], tile_rows(experts_of.size, bits.shape[0]))
    rows = _gather_rows(x, groups, k)

    def tile(_, item):
        index, expert, row = item

        def run():
            gate_up = _switch_block(arena, bits[expert, 0], pages[expert, 0], geometry, 0)
            down = _switch_block(arena, bits[expert, 1], pages[expert, 1], geometry, 1)
            out, inner = _ffn(row, gate_up, down)
            return out, jnp.sum(inner * inner, -1)

        def skip():
            return jnp.zeros_like(row), jnp.zeros(row.shape[:1], row.dtype)

        return None, lax.cond(index < groups.used, run, skip)

    steps = jnp.arange(groups.expert.shape[0])
    _, (out, inner_norm) = lax.scan(tile, None, (steps, groups.expert, rows))
    inside = groups.slot < inner_norm.size
    inner_norm = jnp.where(inside, inner_norm.reshape(-1)[jnp.where(inside, groups.slot, 0)], 0.0)
    outer_norm = jnp.where(inside, jnp.sum(x * x, -1)[:, None], 0.0)
    return combine(out, groups, gates), jnp.stack([outer_norm, inner_norm], -1)

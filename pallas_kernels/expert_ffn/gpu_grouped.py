"""The product of many rows: an active expert is dequantized once, then a grouped matrix product.

Experts come in waves whose dequantized weights fit in a scratch buffer. Operands are float16, sums float32: centroids
are float16 as they are, row scales come after the sum, and a row of activations is divided by its largest element.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn.gpu_ffn import by_column
from pallas_kernels.expert_ffn.gpu_tiles import Tile, Weights, by_bits
from pallas_kernels.expert_ffn.grouping import Groups, tile_count
from pallas_kernels.expert_ffn.reference import ACTIVATIONS
from pallas_kernels.expert_ffn.tuning import Blocks
from pallas_kernels.gpu import launch
from pallas_kernels.pages import MATRICES, Geometry, ceil_div

LARGEST = float(jnp.finfo(jnp.float16).max)


def grouped(
    x: jax.Array,
    source: jax.Array,
    groups: Groups,
    weights: Weights,
    geometry: Geometry,
    matrix: int,
    activation: str,
    blocks: Blocks,
    interpret: bool,
    operands=jnp.float16,
) -> jax.Array:
    """Rows ``source`` int32[tiles, m] of ``x`` float32[n, K] times their tile's matrix: float32[tiles, m, N].

    Matrix 0 gives ``activation(gate) * up``. ``operands`` float16, or float32 for tests. A bfloat16 weight beyond
    float16's range is cut to it. Tiles that are not in use are 0.
    """
    experts, choices = weights.bits.shape[0], source.size
    shape = geometry.shape(matrix)
    row_bytes = 32 * shape.plane_row_words * jnp.dtype(operands).itemsize
    at_once = max(1, min(experts, blocks.scratch_bytes // (shape.rows * row_bytes)))
    waves = ceil_div(experts, at_once)
    tiles, m = source.shape
    most = min(tiles, tile_count(choices, at_once, m))

    # Tiles lie by expert, so those of a wave are a range.
    used = jnp.where(jnp.arange(tiles) < groups.used, groups.expert, experts)
    ends = jnp.searchsorted(used, jnp.arange(waves + 1) * at_once).astype(jnp.int32)
    active = jnp.zeros(waves * at_once, jnp.int32).at[used].set(1, mode="drop")

    x = by_column(x).reshape(len(x), -1)
    x_scale = jnp.ones(len(x), jnp.float32)
    if operands == jnp.float16:
        x_scale = jnp.max(jnp.abs(x), 1)
        x_scale = jnp.where(x_scale > 0, x_scale, 1.0)
        x = (x / x_scale[:, None]).astype(jnp.float16)

    def wave(i, out):
        span = jnp.stack([i * at_once, ends[i], ends[i + 1]])
        dense = _dequantize(span, active, weights, geometry, matrix, at_once, blocks, interpret, operands)
        return _product(
            span, groups.expert, source, x, x_scale, *dense, out, matrix, activation, most, blocks, interpret
        )

    outputs = shape.rows // (2 - matrix)
    return lax.fori_loop(0, waves, wave, jnp.zeros((tiles, m, outputs), jnp.float32))


def _dequantize(
    span: jax.Array,
    active: jax.Array,
    weights: Weights,
    geometry: Geometry,
    matrix: int,
    count: int,
    blocks: Blocks,
    interpret: bool,
    dtype,
) -> tuple[jax.Array, jax.Array]:
    """Weights ``dtype[count, N, 32 * words]``, columns as :func:`by_column`, and row scales float32[count, N].

    Of the active experts from ``span[0]`` on; what is not active is not written.
    """
    shape = geometry.shape(matrix)

    def kernel(span_ref, active_ref, arena_ref, bits_ref, pages_ref, out_ref, scale_ref):
        at, first = pl.program_id(0), pl.program_id(1) * blocks.rows
        expert = span_ref[0] + at

        @pl.when(active_ref[expert] > 0)
        def _():
            row = lax.broadcasted_iota(jnp.int32, (blocks.rows, 1), 0)
            rows = jnp.minimum(first + row, shape.rows - 1)
            memory = Weights(arena_ref, bits_ref, pages_ref)
            tile = Tile(memory, expert, geometry, matrix, rows, blocks.register_bits, interpret)

            def run(bits):
                def use(carry, word, column, value):
                    if dtype == jnp.float16:
                        value = jnp.clip(value, -LARGEST, LARGEST) if bits == 16 else value
                    to = column * shape.plane_row_words + jnp.broadcast_to(word, value.shape)
                    inside = jnp.broadcast_to(word < shape.plane_row_words, value.shape)
                    ref = out_ref.at[at, jnp.broadcast_to(rows, value.shape), to]
                    plgpu.store(ref, value.astype(dtype), mask=inside)
                    return carry

                scale, _ = tile.fold(bits, blocks.words[matrix], jnp.int32(0), use)
                plgpu.store(scale_ref.at[at, rows], scale)

            by_bits(bits_ref[expert, matrix], geometry, run)

    dense = jax.ShapeDtypeStruct((count, shape.rows, 32 * shape.plane_row_words), dtype)
    return launch(
        kernel,
        f"pwjax_dequantize_{MATRICES[matrix]}",
        (count, ceil_div(shape.rows, blocks.rows)),
        (dense, jax.ShapeDtypeStruct((count, shape.rows), jnp.float32)),
        (span, active, *weights),
        blocks.warps,
        1,
        interpret,
    )


def _product(
    span: jax.Array,
    expert: jax.Array,
    source: jax.Array,
    x: jax.Array,
    x_scale: jax.Array,
    dense: jax.Array,
    scale: jax.Array,
    out: jax.Array,
    matrix: int,
    activation: str,
    most: int,
    blocks: Blocks,
    interpret: bool,
) -> jax.Array:
    """``out`` with the tiles ``span[1] <= t < span[2]`` written, ``most`` of them at most."""
    halves, depth, m, outputs = 2 - matrix, x.shape[1], source.shape[1], out.shape[2]
    n, k = blocks.block_n, blocks.block_k
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def kernel(span_ref, expert_ref, source_ref, x_ref, x_scale_ref, dense_ref, scale_ref, _, out_ref):
        tile, first = span_ref[1] + pl.program_id(0), pl.program_id(1) * n

        @pl.when(tile < span_ref[2])
        def _():
            slot = expert_ref[tile] - span_ref[0]
            row = lax.broadcasted_iota(jnp.int32, (m, 1), 0)
            token = source_ref[tile, row]
            column = first + lax.broadcasted_iota(jnp.int32, (n, 1), 0)
            clamped = jnp.minimum(column, outputs - 1)
            lane = lax.broadcasted_iota(jnp.int32, (1, k), 1)

            def read(ref, at, lead, rows, width):
                at, rows = jnp.broadcast_to(at, (width, k)), jnp.broadcast_to(rows, (width, k))
                return plgpu.load(ref.at[(*lead, rows, at)], mask=at < depth, other=0.0)

            def step(i, sums):
                at = i * k + lane
                left = read(x_ref, at, (), token, m)
                right = [read(dense_ref, at, (slot,), half * outputs + clamped, n) for half in range(halves)]
                return tuple(
                    total + jnp.dot(left, own.T, preferred_element_type=jnp.float32, precision=precision)
                    for total, own in zip(sums, right, strict=True)
                )

            sums = lax.fori_loop(0, ceil_div(depth, k), step, (jnp.zeros((m, n), jnp.float32),) * halves)
            across = first + lax.broadcasted_iota(jnp.int32, (1, n), 1)
            own = jnp.minimum(across, outputs - 1)
            sums = [s * scale_ref[slot, half * outputs + own] * x_scale_ref[token] for half, s in enumerate(sums)]
            result = ACTIVATIONS[activation](sums[0]) * sums[1] if halves == 2 else sums[0]
            at = jnp.broadcast_to(row, (m, n)), jnp.broadcast_to(across, (m, n))
            plgpu.store(out_ref.at[(tile, *at)], result, mask=at[1] < outputs)

    return launch(
        kernel,
        f"pwjax_product_{MATRICES[matrix]}",
        (most, ceil_div(outputs, n)),
        jax.ShapeDtypeStruct(out.shape, out.dtype),
        (span, expert, source, x, x_scale, dense, scale, out),
        blocks.product_warps,
        blocks.stages,
        interpret,
        {7: 0},
    )

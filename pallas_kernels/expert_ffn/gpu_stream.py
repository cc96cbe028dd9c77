"""The product of few rows: planes are decoded in registers and multiplied where they are, in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn.gpu_ffn import by_column, power_of_two
from pallas_kernels.expert_ffn.gpu_tiles import Tile, Weights, by_bits
from pallas_kernels.expert_ffn.grouping import Groups
from pallas_kernels.expert_ffn.reference import ACTIVATIONS
from pallas_kernels.expert_ffn.tuning import Blocks
from pallas_kernels.gpu import launch
from pallas_kernels.pages import MATRICES, Geometry, ceil_div


def streamed(
    x: jax.Array,
    source: jax.Array,
    groups: Groups,
    weights: Weights,
    geometry: Geometry,
    matrix: int,
    activation: str,
    blocks: Blocks,
    interpret: bool,
) -> jax.Array:
    """Rows ``source`` int32[tiles, m] of ``x`` float32[n, K] times their tile's matrix: float32[tiles, m, N].

    Matrix 0 gives ``activation(gate) * up``. Tiles that are not in use are left as they are in memory.
    """
    halves = 2 - matrix
    outputs, (tiles, m) = geometry.shape(matrix).rows // halves, source.shape
    columns, words = blocks.rows // halves, blocks.words[matrix]
    # A power of two, so that the compiler makes one address of a column and a constant distance of every further one.
    x_words = power_of_two(max(words, geometry.shape(matrix).plane_row_words))
    x = by_column(x, x_words).reshape(len(x), -1)

    def kernel(expert_ref, used_ref, source_ref, x_ref, arena_ref, bits_ref, pages_ref, out_ref):
        at, first = pl.program_id(0), pl.program_id(1) * columns

        @pl.when(at < used_ref[0])
        def _():
            expert, tokens = expert_ref[at], [source_ref[at, j] for j in range(m)]
            row = lax.broadcasted_iota(jnp.int32, (blocks.rows, 1), 0)
            # Gate rows, then the up rows of the same columns; past the last column that one again.
            column = jnp.minimum(first + lax.rem(row, jnp.int32(columns)), outputs - 1)
            rows = lax.div(row, jnp.int32(columns)) * outputs + column
            memory = Weights(arena_ref, bits_ref, pages_ref)
            tile = Tile(memory, expert, geometry, matrix, rows, blocks.register_bits, interpret)

            def use(sums, word, column, value):
                place = column * x_words + word
                return tuple(s + value * x_ref[token, place] for s, token in zip(sums, tokens, strict=True))

            def run(bits):
                zeros = (jnp.zeros((blocks.rows, words), jnp.float32),) * m
                scale, sums = tile.fold(bits, words, zeros, use)
                return tuple(jnp.sum(total, 1, keepdims=True) * scale for total in sums)

            own = first + lax.broadcasted_iota(jnp.int32, (columns,), 0)
            which = lax.broadcasted_iota(jnp.int32, (halves, columns), 0)
            for j, total in enumerate(by_bits(bits_ref[expert, matrix], geometry, run)):
                total = total.reshape(halves, columns)
                part = [jnp.sum(jnp.where(which == half, total, 0.0), 0) for half in range(halves)]
                result = ACTIVATIONS[activation](part[0]) * part[1] if halves == 2 else part[0]
                plgpu.store(out_ref.at[at, j, own], result, mask=own < outputs)

    return launch(
        kernel,
        f"pwjax_stream_{MATRICES[matrix]}",
        (tiles, ceil_div(outputs, columns)),
        jax.ShapeDtypeStruct((tiles, m, outputs), jnp.float32),
        (groups.expert, groups.used.reshape(1), source, x, *weights),
        blocks.warps,
        1,
        interpret,
    )

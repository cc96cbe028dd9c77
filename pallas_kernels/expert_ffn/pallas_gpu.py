"""Expert feed-forward on GPUs through Pallas's Triton backend.

Two forms of a product, chosen by the shapes of a program, so that a row's bits never depend on its neighbours: few
choices an expert are multiplied with planes as they stream in (:mod:`.gpu_stream`), many with experts that were
dequantized once (:mod:`.gpu_grouped`). Each program of a kernel writes rows of its own: no atomics, the same bits
every time.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn.gpu_ffn import feed_forward, power_of_two, stream_rows
from pallas_kernels.expert_ffn.tuning import Blocks, blocks_for
from pallas_kernels.pages import Geometry


def pallas_expert_ffn(
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
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
    operands=jnp.float16,
) -> tuple[jax.Array, ...]:
    """Expert feed-forward as :func:`pallas_kernels.expert_ffn.reference.paged_expert_ffn`.

    ``blocks``: sizes of the kernels, by default what ``tuned.json`` has for these shapes. ``interpret`` runs the
    kernels on any device, slowly. ``operands`` of the products of many choices: float16, or float32 for tests.
    """
    # Here, since Pallas takes as long to import as all the rest.
    from pallas_kernels.expert_ffn.gpu_grouped import grouped
    from pallas_kernels.expert_ffn.gpu_stream import streamed
    from pallas_kernels.expert_ffn.gpu_tiles import Weights

    (tokens, k), experts = experts_of.shape, bits.shape[0]
    blocks = blocks or blocks_for(geometry)
    rows, form = stream_rows(tokens, k, experts, blocks), streamed
    if not rows:
        # 16 rows are the least that a matrix unit takes.
        rows = min(blocks.block_m, max(16, power_of_two(tokens * k // experts)))
        form = partial(grouped, operands=operands)
    weights = Weights(arena, bits, pages)

    def product(x, source, groups, matrix):
        return form(x, source, groups, weights, geometry, matrix, activation, blocks, interpret)

    return feed_forward(product, rows, x, experts_of, gates, valid, experts, moments)

"""Expert feed-forward on GPUs through Pallas's Triton backend.

Two forms of a product, chosen by the shapes of a program, so that a row's bits never depend on its neighbours: few
choices an expert are multiplied with planes as they stream in (:mod:`.gpu_stream`), many with experts that were
dequantized once (:mod:`.gpu_grouped`). Each program of a kernel writes rows of its own: no atomics, the same bits
every time.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.grouping import combine, group
from pallas_kernels.expert_ffn.tuning import Blocks, blocks_for
from pallas_kernels.pages import Geometry, ceil_div


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
    if tokens * k < blocks.grouped_from * experts:
        rows, form = _stream_rows(tokens, k, experts, blocks), streamed
    else:
        # 16 rows are the least that a matrix unit takes.
        rows = min(blocks.block_m, max(16, _power_of_two(tokens * k // experts)))
        form = partial(grouped, operands=operands)
    groups = group(experts_of, valid, experts, rows)
    given = groups, Weights(arena, bits, pages), geometry
    # Padding rows read token 0, and weigh nothing.
    source = jnp.where(groups.choice < tokens * k, groups.choice // k, 0)
    inner = form(x, source, *given, 0, activation, blocks, interpret)
    own = jnp.arange(source.size, dtype=jnp.int32).reshape(source.shape)
    out = form(inner.reshape(source.size, -1), own, *given, 1, activation, blocks, interpret)

    # Tiles that are not in use may hold anything.
    used = (jnp.arange(len(groups.expert)) < groups.used)[:, None, None]
    squares = jnp.where(used, inner, 0.0) ** 2
    inside = groups.slot < source.size
    inner_norm = squares.sum(-1).reshape(-1)[jnp.where(inside, groups.slot, 0)]
    norms = jnp.stack([jnp.broadcast_to(jnp.sum(x * x, -1)[:, None], inside.shape), inner_norm], -1)
    found = combine(out, groups, gates), jnp.where(inside[..., None], norms, 0.0)
    if not moments:
        return found
    # Weight of each choice, by token and by the tile row that serves it; products, since a scatter adds in any order.
    one_of = experts_of[..., None] == jnp.arange(experts)
    weight = jnp.where(valid[:, None], gates**2, 0.0)
    by_token = jnp.sum(one_of * weight[..., None], 1)
    row_weight = jnp.pad(weight.reshape(-1), (0, 1))[groups.choice]
    by_row = (groups.expert[:, None, None] == jnp.arange(experts)) * row_weight[..., None]
    total = partial(jnp.dot, precision=lax.Precision.HIGHEST)
    outer = total(by_token.T, x * x)
    return *found, (outer, total(by_row.reshape(-1, experts).T, squares.reshape(source.size, -1)))


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def _stream_rows(tokens: int, k: int, experts: int, blocks: Blocks) -> int:
    """Choices of a tile: twice an even share, since a second pass over an expert's planes costs more than idle rows."""
    return min(blocks.stream_tokens, _power_of_two(min(tokens, ceil_div(2 * tokens * k, experts))))

"""What the GPU backends of expert_ffn share: both products on tiles of choices, the weighted sum and the statistics."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.grouping import combine, group
from pallas_kernels.expert_ffn.tuning import Blocks
from pallas_kernels.pages import ceil_div

# ``product(x, source, groups, matrix)``: rows ``source`` int32[tiles, m] of ``x`` float32[n, K] times their tile's
# matrix, float32[tiles, m, N]; of matrix 0 ``activation(gate) * up``. Tiles that are not in use may hold anything.
Product = Callable[..., jax.Array]


def power_of_two(at_least: int) -> int:
    """Smallest power of two that is not below."""
    return 1 << max(0, at_least - 1).bit_length()


def stream_rows(tokens: int, k: int, experts: int, blocks: Blocks) -> int:
    """Rows of a tile where planes are streamed; 0 where choices are so many that experts are dequantized first.

    Twice an even share, since a second pass over an expert's planes costs more than idle rows.
    """
    if tokens * k >= blocks.grouped_from * experts:
        return 0
    return min(blocks.stream_tokens, power_of_two(min(tokens, ceil_div(2 * tokens * k, experts))))


def by_column(x: jax.Array, multiple: int = 1) -> jax.Array:
    """Rows ``[..., K]`` as ``[..., 32, W]``: column ``32*w + c`` at ``[c, w]``, zeros where K ends.

    W is ``ceil(K/32)``, or the next ``multiple``.
    """
    words = ceil_div(x.shape[-1], 32 * multiple) * multiple
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 32 * words - x.shape[-1])])
    return x.reshape(*x.shape[:-1], words, 32).swapaxes(-1, -2)


def feed_forward(
    product: Product,
    rows: int,
    x: jax.Array,
    experts_of: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    experts: int,
    moments: bool,
) -> tuple[jax.Array, ...]:
    """expert_ffn of tiles of ``rows`` choices, results as of :func:`.reference.paged_expert_ffn`."""
    tokens, k = experts_of.shape
    groups = group(experts_of, valid, experts, rows)
    # Padding rows read token 0, and weigh nothing.
    source = jnp.where(groups.choice < tokens * k, groups.choice // k, 0)
    inner = product(x, source, groups, 0)
    own = jnp.arange(source.size, dtype=jnp.int32).reshape(source.shape)
    out = product(inner.reshape(source.size, -1), own, groups, 1)

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

"""Static-shape grouping of routed choices: sort by expert, pad each expert to whole tiles of rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Groups(NamedTuple):
    """Tiles of choices that share an expert.

    ``expert`` int32[tiles]; ``choice`` int32[tiles, m]: flat index ``t*k + j`` of the choice a tile row
    serves, ``T*k`` where the row is padding; ``used`` int32[]: tiles that hold any row, always the first;
    ``slot`` int32[T, k]: tile row ``tile*m + row`` that serves a choice, ``tiles*m`` where masked out.
    """

    expert: jax.Array
    choice: jax.Array
    used: jax.Array
    slot: jax.Array


def tile_count(choices: int, experts: int, tile_rows: int) -> int:
    """Tiles that hold ``choices`` however they fall on ``experts``."""
    return (choices - 1) // tile_rows + min(experts, choices) if choices else 0


def group(experts_of: jax.Array, valid: jax.Array, num_experts: int, tile_rows: int) -> Groups:
    """Group the choices ``experts_of`` int32[T, k] of the tokens where ``valid`` bool[T] holds."""
    tokens, k = experts_of.shape
    choices = tokens * k
    tiles = tile_count(choices, num_experts, tile_rows)
    key = jnp.where(valid[:, None], experts_of, num_experts).reshape(choices)
    order = jnp.argsort(key, stable=True)
    ranked = key[order]
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[key].add(1)
    first = jnp.cumsum(counts) - counts
    per_expert = (counts[:num_experts] + tile_rows - 1) // tile_rows
    tile_end = jnp.cumsum(per_expert)
    tile_start = jnp.concatenate([tile_end - per_expert, jnp.zeros(1, jnp.int32)])
    rank = jnp.arange(choices, dtype=jnp.int32) - first[ranked]
    row = jnp.where(ranked < num_experts, tile_start[ranked] * tile_rows + rank, tiles * tile_rows)
    choice = jnp.full(tiles * tile_rows, choices, jnp.int32).at[row].set(order.astype(jnp.int32), mode="drop")
    slot = jnp.zeros(choices, jnp.int32).at[order].set(row)
    expert = jnp.searchsorted(tile_end, jnp.arange(tiles), side="right").astype(jnp.int32)
    return Groups(
        expert=jnp.minimum(expert, num_experts - 1),
        choice=choice.reshape(tiles, tile_rows),
        used=tile_end[-1],
        slot=slot.reshape(tokens, k),
    )


def combine(rows: jax.Array, groups: Groups, gates: jax.Array) -> jax.Array:
    """Weighted sum of tile rows ``[tiles, m, H]`` back to tokens: float32[T, H]; masked tokens get 0."""
    flat = rows.reshape(-1, rows.shape[-1])
    inside = groups.slot < flat.shape[0]
    picked = flat[jnp.where(inside, groups.slot, 0)]
    return jnp.einsum("tk,tkh->th", jnp.where(inside, gates, 0.0), jnp.where(inside[..., None], picked, 0.0))

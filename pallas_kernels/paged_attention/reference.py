"""Attention in two parts joined by log-sum-exp: past tokens from arena pages, and fresh tokens.

Online softmax over groups of pages, never a gather of the whole context. An empty past has weight exactly 0,
and iterations past a row's own length leave it unchanged, so a row does not depend on its neighbours' lengths.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Past tokens taken per iteration of the online softmax.
GROUP_TOKENS = 128
# Queries taken at a time where there is no past.
BLOCK_QUERIES = 256


class Past(NamedTuple):
    """Committed KV of every slot.

    ``arena`` uint32[num_pages, page_words]; ``table`` int32[slots, L, 2, P] (K and V page ids; page 0 is null);
    ``length`` int32[slots] tokens in pages. Turn ``t``, the tokens ``t * page_tokens`` onwards, lies in column
    ``t % P``: where layers have a window, a table that holds the window is a ring.
    """

    arena: jax.Array
    table: jax.Array
    length: jax.Array


class Softmax(NamedTuple):
    """Running softmax: ``acc`` [B, G, R, T, D], ``peak`` and ``total`` [B, G, R, T] (G KV heads, R queries each)."""

    acc: jax.Array
    peak: jax.Array
    total: jax.Array


def _absorb(state: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Softmax:
    """Take keys/values [B, F, G, D] with ``mask`` broadcastable to [B, 1, 1, T, F] into the running softmax."""
    scores = jnp.where(mask, jnp.einsum("bgrtd,bfgd->bgrtf", q, k), -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(-1))
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weight = jnp.exp(scores - safe[..., None])
    keep = jnp.exp(state.peak - safe)
    acc = state.acc * keep[..., None] + jnp.einsum("bgrtf,bfgd->bgrtd", weight, v)
    return Softmax(acc, peak, state.total * keep + weight.sum(-1))


def pack_rows(rows: jax.Array) -> jax.Array:
    """uint32[..., row_words] words of KV rows [..., heads, D] in bfloat16 or float32."""
    flat = rows.reshape(*rows.shape[:-2], -1)
    if flat.dtype == jnp.float32:
        return lax.bitcast_convert_type(flat, jnp.uint32)
    return lax.bitcast_convert_type(flat.reshape(*flat.shape[:-1], -1, 2), jnp.uint32)


def unpack_rows(words: jax.Array, heads: int, dtype) -> jax.Array:
    """float32[..., heads, D] from :func:`pack_rows` words."""
    if dtype == jnp.float32:
        flat = lax.bitcast_convert_type(words, jnp.float32)
    else:
        flat = lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)
    return flat.reshape(*words.shape[:-1], heads, -1)


def reference_paged_attention(
    q: jax.Array,
    fresh_k: jax.Array,
    fresh_v: jax.Array,
    fresh_start: jax.Array,
    past: Past | None,
    layer: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attention as :func:`pallas_kernels.paged_attention.paged_attention`, in XLA; differentiable without a past."""
    if past is None and (q.shape[0] > 1 or q.shape[1] > BLOCK_QUERIES):
        return _by_blocks(q, fresh_k, fresh_v, fresh_start, window)
    batch, length, heads, dim = q.shape
    kv_heads = fresh_k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    lead = q.shape[:-1]
    state = Softmax(jnp.zeros(q.shape, jnp.float32), jnp.full(lead, -jnp.inf), jnp.zeros(lead))
    own = fresh_start + jnp.arange(length)  # index of each query among the fresh tokens
    if past is not None:
        state = _absorb_past(state, q, past, layer, own, window, kv_heads, fresh_k.dtype)
    back = own[:, None] - jnp.arange(fresh_k.shape[1])
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    state = _absorb(state, q, fresh_k.astype(jnp.float32), fresh_v.astype(jnp.float32), seen)
    out = state.acc / state.total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * dim)


def attention_gradients(window, read, cotangent):
    """Cotangents of queries, keys and values, for backends without their own; computes the forward again."""
    q, fresh_k, fresh_v, start, past, layer = read

    def forward(q, fresh_k, fresh_v):
        return reference_paged_attention(q, fresh_k, fresh_v, start, past, layer, window)

    _, pull = jax.vjp(forward, q, fresh_k, fresh_v)
    return *pull(cotangent), None, None, None


def _by_blocks(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, window: int | None) -> jax.Array:
    """:func:`reference_paged_attention` without a past, one sequence and one block of queries at a time.

    Scores then stay in cache and never take queries x keys of memory; backward recomputes them.
    """
    length = q.shape[1]
    blocks = -(-length // BLOCK_QUERIES)
    rows = -(-length // blocks)

    def sequence(row):
        queries, keys, values = row
        padded = jnp.pad(queries, ((0, blocks * rows - length), (0, 0), (0, 0)))

        def block(item):
            rows = item[0][None], keys[None], values[None]
            return reference_paged_attention(*rows, item[1], None, jnp.int32(0), window)[0]

        items = padded.reshape(blocks, rows, *queries.shape[1:]), start + rows * jnp.arange(blocks)
        return lax.map(jax.checkpoint(block), items).reshape(blocks * rows, -1)[:length]

    return lax.map(sequence, (q, k, v))


def _absorb_past(
    state: Softmax,
    q: jax.Array,
    past: Past,
    layer: jax.Array,
    own: jax.Array,
    window: int | None,
    kv_heads: int,
    dtype,
) -> Softmax:
    batch, dim = q.shape[0], q.shape[-1]
    row_words = kv_heads * dim * jnp.dtype(dtype).itemsize // 4
    page_tokens = past.arena.shape[1] // row_words
    table = lax.dynamic_index_in_dim(past.table, layer, axis=1, keepdims=False)  # (slots, 2, P)
    columns = table.shape[-1]
    step = min(columns, max(1, GROUP_TOKENS // page_tokens))
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -columns % step)))
    turns = (past.length + page_tokens - 1) // page_tokens
    newest = turns[:, None] - 1

    def tokens_of(pages):  # (slots, step) -> (slots, step * page_tokens, heads, D)
        words = past.arena[pages, : page_tokens * row_words]
        return unpack_rows(words.reshape(batch, -1, row_words), kv_heads, dtype)

    def body(i, state):
        pages = lax.dynamic_slice_in_dim(table, i * step, step, axis=2)
        column = i * step + jnp.arange(step)
        # The newest turn that a column can hold; a table as wide as the context never wraps.
        turn = newest - (newest - column) % columns
        turn = jnp.where(column < columns, turn, -1)
        position = (turn[:, :, None] * page_tokens + jnp.arange(page_tokens)).reshape(batch, -1)
        seen = (position >= 0) & (position < past.length[:, None])
        values = jnp.where(seen[:, :, None, None], tokens_of(pages[:, 1]), 0.0)
        mask = seen[:, None, None, None, :]
        if window is not None:
            back = (past.length[:, None] + own)[:, :, None] - position[:, None, :]
            mask = mask & (back < window)[:, None, None]
        return _absorb(state, q, tokens_of(pages[:, 0]), values, mask)

    return lax.fori_loop(0, (jnp.minimum(turns.max(), columns) + step - 1) // step, body, state)

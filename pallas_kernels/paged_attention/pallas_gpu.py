"""Attention on GPUs through Pallas's Triton backend: pages are read where they lie, scores never leave registers.

A program takes a block of queries of one slot that share a KV head, the past tokens from pages and then the fresh
ones, in one running softmax. bfloat16 keys and values come as words of two columns: even and odd columns are kept
apart all the way. Nothing is added by atomics.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import launch
from pallas_kernels.paged_attention.reference import Past, attention_gradients
from pallas_kernels.pages import ceil_div


def pallas_paged_attention(
    q: jax.Array,
    fresh_k: jax.Array,
    fresh_v: jax.Array,
    fresh_start: jax.Array | int,
    past: Past | None,
    layer: jax.Array | int,
    window: int | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention as :func:`pallas_kernels.paged_attention.paged_attention`; ValueError for bfloat16 heads of odd size.

    ``interpret`` runs the kernel on any device, slowly.
    """
    if fresh_k.dtype == jnp.bfloat16 and q.shape[-1] % 2:
        raise ValueError(f"heads in bfloat16 must have an even size here, got {q.shape[-1]}")
    return _attend(window, interpret, q, fresh_k, fresh_v, jnp.int32(fresh_start), past, jnp.int32(layer))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(window, interpret, q, fresh_k, fresh_v, start, past, layer):
    # Here, since Pallas takes as long to import as all the rest.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (batch, queries, heads, dim), (_, fresh, kv_heads, _) = q.shape, fresh_k.shape
    if past is None:
        empty = jnp.zeros((batch, 1, 2, 1), jnp.int32)
        past, layer = Past(jnp.zeros((1, kv_heads * dim), jnp.uint32), empty, jnp.zeros(batch, jnp.int32)), jnp.int32(0)
    parts = 4 // fresh_k.dtype.itemsize  # columns of a word
    words, shared = dim // parts, heads // kv_heads
    row_words, columns = kv_heads * words, past.table.shape[-1]
    page_tokens = past.arena.shape[1] // row_words
    # Sizes of what a matrix unit multiplies are powers of two, 16 at the least.
    width = max(16, 1 << (words - 1).bit_length())
    # Queries and sums of a block live in registers.
    block = min(max(16, 4096 // (width * parts)), 64, max(16, 1 << (queries * shared - 1).bit_length()))
    step = max(16, min(64, 8192 // (width * parts)))

    def kernel(start_ref, layer_ref, length_ref, q_ref, k_ref, v_ref, table_ref, arena_ref, out_ref):
        slot, head, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * block
        start, layer, length = start_ref[0], layer_ref[0], length_ref[slot]
        row = first + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
        query, own_head = lax.div(row, jnp.int32(shared)), head * shared + lax.rem(row, jnp.int32(shared))
        word = lax.broadcasted_iota(jnp.int32, (1, width), 1)
        token = lax.broadcasted_iota(jnp.int32, (step, 1), 0)
        # The same tokens across, for masks of scores: values are never transposed but in products.
        across = lax.broadcasted_iota(jnp.int32, (1, step), 1)

        def load(ref, mask, *index):
            shape = jnp.broadcast_shapes(mask.shape, *(i.shape for i in index if not isinstance(i, int)))
            index = [jnp.broadcast_to(i, shape) for i in index]
            zero = jnp.zeros((), ref.dtype)
            return plgpu.load(ref.at[tuple(index)], mask=jnp.broadcast_to(mask, shape), other=zero)

        inside = (row < queries * shared) & (word < words)
        asked = [load(q_ref, inside, slot, query, own_head, parts * word + part) for part in range(parts)]

        def absorb(state, k, v, seen):
            *acc, peak, total = state
            scores = sum(
                jnp.dot(a, b.astype(jnp.float32).T, preferred_element_type=jnp.float32)
                for a, b in zip(asked, k, strict=True)
            )
            scores = jnp.where(seen, scores, -jnp.inf)
            highest = jnp.maximum(peak, jnp.max(scores, 1, keepdims=True))
            safe = jnp.where(highest == -jnp.inf, 0.0, highest)
            weight, keep = jnp.exp(scores - safe), jnp.exp(peak - safe)
            acc = [
                a * keep + jnp.dot(weight, b.astype(jnp.float32), preferred_element_type=jnp.float32)
                for a, b in zip(acc, v, strict=True)
            ]
            return *acc, highest, total * keep + jnp.sum(weight, 1, keepdims=True)

        turns = lax.div(length + page_tokens - 1, jnp.int32(page_tokens))

        def place(index):
            """Column, offset in the page, and position of entries of the ring; positions below 0 hold nothing."""
            column, offset = lax.div(index, jnp.int32(page_tokens)), lax.rem(index, jnp.int32(page_tokens))
            column = jnp.minimum(column, columns - 1)
            # The newest turn that a column can hold; a table as wide as the context never wraps.
            turn = turns - 1 - lax.rem(turns - 1 - column + columns, jnp.int32(columns))
            position = turn * page_tokens + offset
            return column, offset, jnp.where((index < columns * page_tokens) & (position < length), position, -1)

        def from_pages(i, state):
            column, offset, position = place(i * step + token)
            held = (position >= 0) & (word < words)

            def rows(which):
                page = load(table_ref, position >= 0, slot, layer, jnp.int32(which), column)
                found = load(arena_ref, held, page, offset * row_words + head * words + word)
                if parts == 1:
                    return [lax.bitcast_convert_type(found, jnp.float32)]
                halves = found << 16, found & jnp.uint32(0xFFFF0000)
                return [lax.bitcast_convert_type(half, jnp.float32) for half in halves]

            _, _, key = place(i * step + across)
            seen = key >= 0
            if window is not None:
                seen = seen & (length + start + query - key < window)
            return absorb(state, rows(0), rows(1), seen)

        def from_fresh(i, state):
            at, mask = i * step + token, (i * step + token < fresh) & (word < words)
            k, v = (
                [load(ref, mask, slot, at, head, parts * word + part) for part in range(parts)]
                for ref in (k_ref, v_ref)
            )
            back = start + query - (i * step + across)
            seen = (back >= 0) & (i * step + across < fresh)
            return absorb(state, k, v, seen if window is None else seen & (back < window))

        state = (
            *(jnp.zeros((block, width), jnp.float32),) * parts,
            jnp.full((block, 1), -jnp.inf),
            jnp.zeros((block, 1)),
        )
        held = jnp.minimum(turns, columns) * page_tokens
        state = lax.fori_loop(0, lax.div(held + step - 1, jnp.int32(step)), from_pages, state)
        last = jnp.minimum(lax.div(first + block - 1, jnp.int32(shared)), queries - 1)
        count = jnp.minimum(start + last + 1, fresh)
        *acc, _, total = lax.fori_loop(0, lax.div(count + step - 1, jnp.int32(step)), from_fresh, state)
        for part, own in enumerate(acc):
            at = [slot, query, own_head, parts * word + part]
            at = tuple(jnp.broadcast_to(i, inside.shape) for i in at)
            plgpu.store(out_ref.at[at], own / total, mask=inside)

    out = launch(
        kernel,
        "pwjax_paged_attention",
        (batch, kv_heads, ceil_div(queries * shared, block)),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        (start.reshape(1), layer.reshape(1), past.length, q, fresh_k, fresh_v, past.table, past.arena),
        4 if block * width * parts <= 2048 else 8,
        2,
        interpret,
    )
    return out.reshape(batch, queries, heads * dim)


def _forward(window, interpret, *read):
    return _attend(window, interpret, *read), read


_attend.defvjp(_forward, lambda window, interpret, *rest: attention_gradients(window, *rest))

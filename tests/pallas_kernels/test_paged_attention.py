"""Attention over pages and fresh tokens against plain softmax in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import Past, pack_rows, paged_attention, unpack_rows

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2


def make_past(lengths, dtype, page_words, rng, layer=1, columns=None):
    """Scattered pages holding random keys and values; ``(Past, k, v)`` with k, v [slots, max, KV_HEADS, DIM]."""
    row_words = KV_HEADS * DIM * jnp.dtype(dtype).itemsize // 4
    page_tokens = page_words // row_words
    turns = max(1, -(-max(lengths) // page_tokens))
    columns = turns if columns is None else min(turns, columns)
    ids = iter(rng.permutation(np.arange(1, 1 + 2 * turns * len(lengths) * LAYERS)))
    # Stale words may read as NaN and must not matter.
    arena = np.full((1 + 2 * turns * len(lengths) * LAYERS, page_words), 0xFFFFFFFF, np.uint32)
    arena[0] = 0
    table = np.zeros((len(lengths), LAYERS, 2, columns), np.int32)
    values = rng.normal(size=(2, len(lengths), turns * page_tokens, KV_HEADS, DIM)).astype(np.float32)
    values = np.array(jnp.asarray(values).astype(dtype).astype(jnp.float32))
    for slot, length in enumerate(lengths):
        for which in (0, 1):
            rows = np.asarray(pack_rows(jnp.asarray(values[which, slot]).astype(dtype)))
            for token in range(length):
                turn, at = divmod(token, page_tokens)
                # A ring writes over what it held before.
                if at == 0 and turn < columns:
                    table[slot, layer, which, turn] = next(ids)
                arena[table[slot, layer, which, turn % columns], at * row_words : (at + 1) * row_words] = rows[token]
    past = Past(jnp.asarray(arena), jnp.asarray(table), jnp.asarray(lengths, jnp.int32))
    return past, values[0], values[1]


def oracle(q, fresh_k, fresh_v, start, lengths, past_k, past_v, window=10**6):
    out = np.zeros((*q.shape[:2], HEADS, DIM))
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = start + t + 1
            k = np.concatenate([past_k[b, : lengths[b]], fresh_k[b, :seen]])[-window:]
            v = np.concatenate([past_v[b, : lengths[b]], fresh_v[b, :seen]])[-window:]
            for h in range(HEADS):
                scores = k[:, h * KV_HEADS // HEADS] @ q[b, t, h].astype(np.float64)
                weight = np.exp(scores - scores.max())
                out[b, t, h] = weight / weight.sum() @ v[:, h * KV_HEADS // HEADS]
    return out.reshape(*q.shape[:2], -1)


@pytest.mark.parametrize(
    ("lengths", "page_words", "dtype"),
    [
        ([0, 1, 37], 40, "float32"), ([0, 1, 37], 40, "bfloat16"),
        ([300, 5, 128], 100, "float32"), ([0, 0], 64, "bfloat16"),
    ],
)
def test_past_and_fresh_tokens_join_as_one_softmax(lengths, page_words, dtype):
    rng = np.random.default_rng(sum(lengths))
    past, past_k, past_v = make_past(lengths, dtype, page_words, rng)
    batch, queries, start, fresh = len(lengths), 3, 2, 6
    q = rng.normal(size=(batch, queries, HEADS, DIM)).astype(np.float32)
    fresh_k, fresh_v = (jnp.asarray(rng.normal(size=(batch, fresh, KV_HEADS, DIM))).astype(dtype) for _ in range(2))
    got = jax.jit(paged_attention)(q, fresh_k, fresh_v, start, past, 1)
    exact = (np.asarray(a.astype(jnp.float32)) for a in (fresh_k, fresh_v))
    np.testing.assert_allclose(got, oracle(q, *exact, start, lengths, past_k, past_v), atol=3e-6)


@pytest.mark.parametrize("window", [1, 4, 30, 200])
def test_a_window_is_read_from_a_ring_of_pages(window):
    rng, lengths = np.random.default_rng(window), [0, 1, 37, 128, 300]
    page_tokens = 6
    columns = -(-(window - 1) // page_tokens) + 1
    past, past_k, past_v = make_past(lengths, "float32", 16 * page_tokens + 5, rng, columns=columns)
    q = rng.normal(size=(5, 5, HEADS, DIM)).astype(np.float32)
    fresh_k, fresh_v = (rng.normal(size=(5, 8, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    run = jax.jit(paged_attention, static_argnames="window")
    got = run(q, fresh_k, fresh_v, 2, past, 1, window=window)
    np.testing.assert_allclose(got, oracle(q, fresh_k, fresh_v, 2, lengths, past_k, past_v, window), atol=3e-6)


@pytest.mark.parametrize("window", [1, 7, 300])
def test_a_window_without_a_past(window):
    rng = np.random.default_rng(4)
    q = rng.normal(size=(2, 300, HEADS, DIM)).astype(np.float32)
    k, v = (rng.normal(size=(2, 300, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    none = np.zeros((2, 0, KV_HEADS, DIM))
    got = paged_attention(q, jnp.asarray(k), jnp.asarray(v), 0, None, 0, window)
    np.testing.assert_allclose(got, oracle(q, k, v, 0, [0, 0], none, none, window), atol=3e-6)


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (2, 513)])
def test_no_past_is_plain_causal_attention(batch, length):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(batch, length, HEADS, DIM)).astype(np.float32)
    k, v = (rng.normal(size=(batch, length, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    none = np.zeros((batch, 0, KV_HEADS, DIM))
    want = oracle(q, k, v, 0, [0] * batch, none, none)
    np.testing.assert_allclose(paged_attention(q, jnp.asarray(k), jnp.asarray(v), 0, None, 0), want, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_round_trip(dtype):
    rows = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5, KV_HEADS, DIM))).astype(dtype)
    words = pack_rows(rows)
    assert words.dtype == jnp.uint32 and words.shape == (3, 5, KV_HEADS * DIM * rows.dtype.itemsize // 4)
    np.testing.assert_array_equal(unpack_rows(words, KV_HEADS, rows.dtype), rows.astype(jnp.float32))

"""Every paged_attention implementation against plain softmax in NumPy: one shared class of tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lesser_sets import run_again

from pallas_kernels import native
from pallas_kernels.paged_attention import IMPLEMENTATIONS, Past, pack_rows, paged_attention, problems, unpack_rows

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2


def make_past(lengths, dtype, page_words, rng, layer=1, columns=None, heads=KV_HEADS, dim=DIM):
    """Scattered pages holding random keys and values; ``(Past, k, v)`` with k, v [slots, max, heads, dim]."""
    row_words = heads * dim * jnp.dtype(dtype).itemsize // 4
    page_tokens = page_words // row_words
    turns = max(1, -(-max(lengths) // page_tokens))
    columns = turns if columns is None else min(turns, columns)
    ids = iter(rng.permutation(np.arange(1, 1 + 2 * turns * len(lengths) * LAYERS)))
    # Stale words may read as NaN and must not matter.
    arena = np.full((1 + 2 * turns * len(lengths) * LAYERS, page_words), 0xFFFFFFFF, np.uint32)
    arena[0] = 0
    table = np.zeros((len(lengths), LAYERS, 2, columns), np.int32)
    values = rng.normal(size=(2, len(lengths), turns * page_tokens, heads, dim)).astype(np.float32)
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


def oracle(q, fresh_k, fresh_v, start, lengths, past_k, past_v, window=None):
    """Softmax in float64, query by query."""
    (batch, queries, heads, dim), kv_heads = q.shape, fresh_k.shape[2]
    out = np.zeros(q.shape)
    for b in range(batch):
        for t in range(queries):
            seen = start + t + 1
            k = np.concatenate([past_k[b, : lengths[b]], fresh_k[b, :seen]])[-(window or 10**6) :]
            v = np.concatenate([past_v[b, : lengths[b]], fresh_v[b, :seen]])[-(window or 10**6) :]
            for h in range(heads):
                scores = k[:, h * kv_heads // heads] @ q[b, t, h].astype(np.float64)
                weight = np.exp(scores - scores.max())
                out[b, t, h] = weight / weight.sum() @ v[:, h * kv_heads // heads]
    return out.reshape(batch, queries, heads * dim)


def make_fresh(rng, batch, queries, fresh, dtype="float32", heads=HEADS, kv_heads=KV_HEADS, dim=DIM):
    """Queries, keys and values of a dispatch."""
    q = rng.normal(size=(batch, queries, heads, dim)).astype(np.float32)
    return q, *(jnp.asarray(rng.normal(size=(batch, fresh, kv_heads, dim))).astype(dtype) for _ in range(2))


def exact(*rows):
    return (np.asarray(a.astype(jnp.float32)) for a in rows)


class PagedAttention:
    """What every backend must do; a backend is a subclass that names it."""

    implementation: str

    def run(self, *args, window=None):
        return jax.jit(partial(paged_attention, window=window, implementation=self.implementation))(*args)

    @pytest.mark.parametrize(
        ("lengths", "page_words", "dtype"),
        [
            ([0, 1, 37], 40, "float32"), ([0, 1, 37], 40, "bfloat16"),
            ([300, 5, 128], 100, "float32"), ([0, 0], 64, "bfloat16"),
        ],
    )  # fmt: skip
    def test_past_and_fresh_tokens_join_as_one_softmax(self, lengths, page_words, dtype):
        rng = np.random.default_rng(sum(lengths))
        past, past_k, past_v = make_past(lengths, dtype, page_words, rng)
        q, fresh_k, fresh_v = make_fresh(rng, len(lengths), 3, 6, dtype)
        want = oracle(q, *exact(fresh_k, fresh_v), 2, lengths, past_k, past_v)
        np.testing.assert_allclose(self.run(q, fresh_k, fresh_v, 2, past, 1), want, atol=3e-6)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim"), [(1, 1, 2), (6, 6, 20), (12, 3, 32), (8, 1, 36), (5, 5, 128), (16, 2, 24)]
    )
    @pytest.mark.parametrize(("queries", "dtype"), [(70, "bfloat16"), (1, "float32")])
    def test_heads_of_any_number_and_size(self, heads, kv_heads, dim, queries, dtype):
        rng, lengths = np.random.default_rng(dim), [45, 0]
        row_words = kv_heads * dim * jnp.dtype(dtype).itemsize // 4
        past, past_k, past_v = make_past(lengths, dtype, 7 * row_words + 1, rng, heads=kv_heads, dim=dim)
        q, fresh_k, fresh_v = make_fresh(rng, 2, queries, queries + 1, dtype, heads, kv_heads, dim)
        q *= dim**-0.5
        want = oracle(q, *exact(fresh_k, fresh_v), 1, lengths, past_k, past_v)
        np.testing.assert_allclose(self.run(q, fresh_k, fresh_v, 1, past, 1), want, atol=3e-6)

    @pytest.mark.parametrize("window", [1, 4, 30, 200])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_window_is_read_from_a_ring_of_pages(self, window, dtype):
        rng, lengths = np.random.default_rng(window), [0, 1, 37, 128, 300]
        page_tokens = 6
        columns = -(-(window - 1) // page_tokens) + 1
        page_words = 4 * jnp.dtype(dtype).itemsize * page_tokens + 3
        past, past_k, past_v = make_past(lengths, dtype, page_words, rng, columns=columns)
        q, fresh_k, fresh_v = make_fresh(rng, 5, 5, 8, dtype)
        want = oracle(q, *exact(fresh_k, fresh_v), 2, lengths, past_k, past_v, window)
        np.testing.assert_allclose(self.run(q, fresh_k, fresh_v, 2, past, 1, window=window), want, atol=3e-6)

    @pytest.mark.parametrize("window", [1, 7, 300])
    def test_a_window_without_a_past(self, window):
        q, k, v = make_fresh(np.random.default_rng(4), 2, 300, 300)
        none = np.zeros((2, 0, KV_HEADS, DIM))
        want = oracle(q, *exact(k, v), 0, [0, 0], none, none, window)
        np.testing.assert_allclose(self.run(q, k, v, 0, None, 0, window=window), want, atol=3e-6)

    @pytest.mark.parametrize(("batch", "length"), [(1, 5), (2, 513)])
    def test_no_past_is_plain_causal_attention(self, batch, length):
        q, k, v = make_fresh(np.random.default_rng(1), batch, length, length)
        none = np.zeros((batch, 0, KV_HEADS, DIM))
        want = oracle(q, *exact(k, v), 0, [0] * batch, none, none)
        np.testing.assert_allclose(self.run(q, k, v, 0, None, 0), want, atol=3e-6)

    def test_an_empty_past_has_no_weight(self):
        rng = np.random.default_rng(5)
        past, *_ = make_past([0, 0], "float32", 64, rng)
        q, k, v = make_fresh(rng, 2, 2, 2)
        q *= 50  # scores far below those of keys of zeros
        k = -jnp.abs(k) * jnp.sign(q[:, :1, :KV_HEADS])
        none = np.zeros((2, 0, KV_HEADS, DIM))
        got = self.run(q, k, v, 0, past, 1)
        np.testing.assert_array_equal(got[:, 0], v[:, 0].repeat(HEADS // KV_HEADS, 1).reshape(2, -1))
        np.testing.assert_allclose(got, oracle(q, *exact(k, v), 0, [0, 0], none, none), atol=3e-6)

    @pytest.mark.parametrize("window", [None, 30])
    def test_a_slot_does_not_depend_on_its_neighbours(self, window):
        rng, lengths = np.random.default_rng(6), [37, 0, 128, 5]
        past, *_ = make_past(lengths, "bfloat16", 40, rng)
        q, k, v = make_fresh(rng, 4, 2, 4, "bfloat16")
        together = np.asarray(self.run(q, k, v, 1, past, 1, window=window))
        for slot in range(4):
            # The others sit out, and what they hold is something else.
            own = np.arange(4) == slot
            other = Past(past.arena, jnp.where(own[:, None, None, None], past.table, 0), past.length * own)
            mask = own[:, None, None, None]
            rows = (jnp.where(mask, a, 9).astype(a.dtype) for a in (q, k, v))
            alone = self.run(*rows, 1, other, 1, window=window)
            np.testing.assert_array_equal(alone[slot], together[slot])

    def test_gradients_without_a_past(self):
        rows = make_fresh(np.random.default_rng(7), 2, 9, 9)

        def total(form):
            return jax.grad(lambda q, k, v: jnp.sum(jnp.sin(form(q, k, v))), (0, 1, 2))(*rows)

        def plain(q, k, v):
            k, v = (a.repeat(HEADS // KV_HEADS, 2) for a in (k, v))
            scores = jnp.where(jnp.tri(9, dtype=bool), jnp.einsum("bthd,bfhd->bhtf", q, k), -jnp.inf)
            return jnp.einsum("bhtf,bfhd->bthd", jax.nn.softmax(scores), v).reshape(2, 9, -1)

        got = total(lambda q, k, v: self.run(q, k, v, 0, None, 0))
        for one, want in zip(got, total(plain), strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)

    def test_vmap_is_one_call_after_another(self):
        q, k, v = make_fresh(np.random.default_rng(8), 6, 3, 3)
        one = lambda q, k, v: paged_attention(q, k, v, 0, None, 0, implementation=self.implementation)  # noqa: E731
        got = jax.vmap(one)(*(a.reshape(3, 2, *a.shape[1:]) for a in (q, k, v)))
        np.testing.assert_allclose(got.reshape(6, 3, -1), one(q, k, v), atol=1e-6)


class TestXla(PagedAttention):
    implementation = "xla"


@pytest.mark.skipif(bool(problems()["native"]), reason=problems()["native"])
class TestNative(PagedAttention):
    implementation = "native"

    @pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(32, 4, 4), (20, 6, 2)])
    @pytest.mark.parametrize("window", [None, 33])
    def test_bits_of_a_row_are_those_of_any_other_program(self, dim, heads, kv_heads, window):
        # One sequence of which less and less is past: many queries at once, a few, one; alone and beside others.
        rng, length, batch = np.random.default_rng(dim), 90, 3
        past, *rows = make_past([length] * batch, "bfloat16", 7 * kv_heads * dim // 2, rng, heads=kv_heads, dim=dim)
        rows = [jnp.asarray(a[:, :length]).astype("bfloat16") for a in rows]
        q = rng.normal(size=(batch, length, heads, dim)).astype(np.float32)
        whole = np.asarray(self.run(q, *rows, 0, None, 0, window=window))
        for done, slots, queries in ((89, 3, 1), (89, 1, 1), (64, 3, 3), (61, 2, 29), (1, 1, 64)):
            now = past._replace(table=past.table[:slots], length=jnp.full(slots, done, jnp.int32))
            fresh = (a[:slots, done : done + queries] for a in rows)
            got = self.run(q[:slots, done : done + queries], *fresh, 0, now, 1, window=window)
            np.testing.assert_array_equal(got, whole[:slots, done : done + queries])

    @pytest.mark.parametrize(
        ("what", "value", "message"),
        [
            ("page", -1, "page -1 is outside of the arena's"),
            ("page", 2**31 - 1, "is outside of the arena's"),
            ("length", -1, "a past of -1 tokens"),
            ("length", 2**31 - 1, "columns of the page table's"),
            ("layer", -1, "layer -1 is not one of 2"),
            ("layer", LAYERS, "layer 2 is not one of 2"),
            ("start", -1, "2 queries from fresh token -1 on"),
            ("start", 3, "and there are 4"),
        ],
    )
    @pytest.mark.parametrize("window", [None, 9])
    def test_what_is_out_of_range_is_an_error_and_no_stray_read(self, what, value, message, window):
        rng = np.random.default_rng(3)
        past, *_ = make_past([37, 0], "float32", 40, rng)
        q, k, v = make_fresh(rng, 2, 2, 4)
        start, layer = 1, 1
        if what == "page":
            past = past._replace(table=past.table.at[0, 1, 1, 36 // 2].set(value))
        elif what == "length":
            past = past._replace(length=past.length.at[1].set(value))
        elif what == "layer":
            layer = value
        else:
            start = value
        if what == "length" and value > 0 and window:
            # A ring holds the window of a sequence of any length; these pages are no ring.
            past = past._replace(table=past.table[..., :1])
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(self.run(q, k, v, start, past, layer, window=window))
        if what == "page":
            # A page that no query sees is not looked at.
            jax.block_until_ready(self.run(q, k, v, start, past._replace(length=past.length * 0), layer, window=window))

    def test_shapes_are_checked_inside(self):
        rng = np.random.default_rng(3)
        past, *_ = make_past([37, 0], "float32", 40, rng)
        q, k, v = make_fresh(rng, 2, 2, 4)
        for wrong, message in (
            ((q, k, v[:, :3], 1, past, 1), "the shapes of arguments and results disagree"),
            ((q, k, v, 1, past._replace(table=past.table[:1]), 1), "the shapes of arguments and results disagree"),
            ((q[:, :, :3], k, v, 1, past, 1), "the heads are misshapen"),
            ((q, k, v.astype(jnp.bfloat16), 1, past, 1), "either bfloat16 or float32"),
            ((q, k, v, 1, past._replace(arena=past.arena[:, :15]), 1), "does not fit in a page"),
        ):
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(self.run(*wrong))

    @pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
    def test_lesser_instruction_sets(self, instructions):
        run_again(__file__, "TestNative and (heads or ring or row_are or page)", instructions)


def test_an_implementation_that_is_unknown_or_unavailable_names_the_others(monkeypatch):
    rows = make_fresh(np.random.default_rng(0), 1, 1, 1)
    with pytest.raises(ValueError, match="unknown paged_attention implementation 'tritn'; choose from xla"):
        paged_attention(*rows, 0, None, 0, implementation="tritn")
    monkeypatch.setattr(native, "load", lambda: (None, "not built"))
    assert problems().keys() == IMPLEMENTATIONS.keys()
    with pytest.raises(ValueError, match="not built.*xla: available"):
        paged_attention(*rows, 0, None, 0, implementation="native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_round_trip(dtype):
    rows = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5, KV_HEADS, DIM))).astype(dtype)
    words = pack_rows(rows)
    assert words.dtype == jnp.uint32 and words.shape == (3, 5, KV_HEADS * DIM * rows.dtype.itemsize // 4)
    np.testing.assert_array_equal(unpack_rows(words, KV_HEADS, rows.dtype), rows.astype(jnp.float32))

"""How fast the kernels are, against dense XLA in the same run: what ``pwjax bench kernels`` prints."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.paged_attention import Past, paged_attention
from pallas_kernels.pages import BlockShape, Geometry, ceil_div, choose_page_words
from pwjax.config import ModelConfig

# Weights in use by turns, so that none is found in a cache: many times the last level cache at any width.
PAGED_EXPERTS, DENSE_EXPERTS = 24, 8
# Layers of KV that take turns: together several times the last level cache, where slots and contexts are not tiny.
LAYERS = 8
WIDTHS = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Case:
    """One thing to measure; ``run(turn)`` computes with the next weights and waits for the result."""

    name: str
    bits: int | str
    bytes: int
    run: Callable[[int], None]


def bench_expert_ffn(
    hidden: int,
    inner: int,
    tokens: tuple[int, ...],
    bits: tuple[int, ...],
    backends: tuple[str, ...],
    seconds: float = 2.0,
    lut_rows: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> list[dict]:
    """Rows of one expert's gate_up, activation and down for each of ``tokens``, all cases taking turns.

    ``speedup_vs_bf16`` and ``speedup_vs_f32`` compare with the fastest of three dense forms in the same turns;
    ``fraction_of_bandwidth`` is the weights' bytes by the median time, over what two plain reads reach here.
    """
    bandwidth = read_bandwidth()
    report(f"memory is read at {bandwidth / 1e9:.1f} GB/s")
    layer, dense = _Layer(hidden, inner, lut_rows), _Dense(hidden, inner)
    rows = []
    for n in tokens:
        x = jax.random.normal(jax.random.key(n), (n, hidden), jnp.float32)
        cases = [*dense.cases(x), *(layer.case(x, b, name) for b in bits for name in backends)]
        report(f"{n} tokens: {len(cases)} forms compiled, measuring")
        median = _medians(cases, seconds * len(cases))
        rows += _rows("expert_ffn", f"{hidden}x{inner}", n, cases, median, bandwidth)
    return rows


def bench_paged_attention(
    config: ModelConfig,
    slots: tuple[int, ...],
    context: int,
    backends: tuple[str, ...],
    seconds: float = 2.0,
    report: Callable[[str], None] = lambda _: None,
) -> list[dict]:
    """Rows of one layer's attention of a decode step, the first kind of ``config``: as many slots as each of ``slots``,
    bfloat16 KV of ``context`` tokens in each.

    Fields as in :func:`bench_expert_ffn`; ``tokens`` are the slots, ``bytes`` the past keys and values. The dense forms
    are softmax attention on one array of all keys and one of all values.
    """
    bandwidth = read_bandwidth()
    rows = []
    for n in slots:
        cases = _Cache(config, n, context).cases(backends)
        report(f"attention of {n} sequences of {context} tokens: {len(cases)} forms compiled, measuring")
        median = _medians(cases, seconds * len(cases))
        rows += _rows("paged_attention", f"{config.num_heads}x{config.head_dim} on {config.num_kv_heads}, {context}",
                      n, cases, median, bandwidth)  # fmt: skip
    return rows


def _rows(op: str, shape: str, tokens: int, cases: list[Case], median: list[float], bandwidth: float) -> list[dict]:
    best = {
        kind: min(ms for case, ms in zip(cases, median, strict=True) if case.bits == kind) for kind in ("bf16", "f32")
    }
    return [
        {
            "op": op,
            "shape": shape,
            "backend": case.name,
            "bits": case.bits,
            "tokens": tokens,
            "median_ms": ms,
            "speedup_vs_bf16": best["bf16"] / ms,
            "speedup_vs_f32": best["f32"] / ms,
            "bytes": case.bytes,
            "fraction_of_bandwidth": case.bytes / (ms * 1e-3) / bandwidth,
        }
        for case, ms in zip(cases, median, strict=True)
    ]


def read_bandwidth(total_bytes: int = 512 << 20) -> float:
    """Bytes a second that as many threads as there are cores read together, the best of five tries."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [np.ones(total_bytes // workers // 4, np.int32) for _ in range(workers)]
    best = 0.0
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(5):
            start = time.perf_counter()
            # A maximum reads everything, writes nothing, and NumPy lets go of the lock meanwhile.
            list(pool.map(np.max, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - start))
    return best


def _medians(cases: list[Case], seconds: float) -> list[float]:
    """Median milliseconds of each, one call each a turn; at least five turns, at most 200.

    Two turns before, uncounted: one compiles, in the other caches and threads are as in all that follow. Each turn has
    an order of its own, for what ran just before decides what the caches hold.
    """
    rng = np.random.default_rng(0)
    for turn in range(2):
        for case in cases:
            case.run(turn)
    times: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + seconds
    for turn in count(2):
        for i in rng.permutation(len(cases)):
            start = time.perf_counter()
            cases[i].run(turn)
            times[i].append((time.perf_counter() - start) * 1e3)
        if turn > 200 or (turn > 5 and time.perf_counter() > end):
            break
    return [float(np.median(own)) for own in times]


class _Layer:
    """Pages of experts: one table for every width, since any bits are a code and every half here is a finite number."""

    def __init__(self, hidden: int, inner: int, lut_rows: int):
        blocks = BlockShape(2 * inner, hidden, lut_rows), BlockShape(hidden, inner, lut_rows)
        self.geometry = Geometry(choose_page_words(*blocks, WIDTHS, True, hidden // 2), WIDTHS, True, *blocks)
        rng = np.random.default_rng(0)
        shape = PAGED_EXPERTS, 2, self.geometry.slots
        ids = rng.permutation(np.arange(1, 1 + int(np.prod(shape))))
        words = rng.integers(0, 2**32, (len(ids) + 1, self.geometry.page_words), np.uint32)
        words &= 0x3BFF3BFF
        self.arena, self.pages = jnp.array(words), jnp.asarray(ids.reshape(shape), jnp.int32)

    def case(self, x: jax.Array, bits: int, backend: str) -> Case:
        """All tokens ``x`` through one expert, another each turn."""
        n = len(x)
        table = jnp.full((PAGED_EXPERTS, 2), bits, jnp.int32)
        gates, valid = jnp.ones((n, 1), jnp.float32), jnp.ones(n, bool)
        choices = [jnp.full((n, 1), e, jnp.int32) for e in range(PAGED_EXPERTS)]
        call = jax.jit(lambda *a: expert_ffn(*a, self.geometry, backend)[0])

        def run(turn):
            expert = choices[turn % PAGED_EXPERTS]
            call(x, expert, gates, valid, self.arena, table, self.pages).block_until_ready()

        pages = sum(self.geometry.block_pages(m, bits) for m in (0, 1))
        return Case(backend, bits, pages * self.geometry.page_bytes, run)


class _Dense:
    """The same product on whole matrices, in the three forms that XLA may be given."""

    def __init__(self, hidden: int, inner: int):
        keys = jax.random.split(jax.random.key(0), DENSE_EXPERTS)
        self.rows = [
            (jax.random.normal(k, (2 * inner, hidden), jnp.float32), jax.random.normal(k, (hidden, inner), jnp.float32))
            for k in keys
        ]

    def cases(self, x: jax.Array) -> Iterator[Case]:
        """Forms in bfloat16, with float32 sums, and in float32."""

        def ffn(x, gate_up, down, product):
            gate, up = jnp.split(product(x, gate_up), 2, -1)
            return product((jax.nn.silu(gate) * up).astype(x.dtype), down)

        forms = {
            "einsum": lambda a, w: jnp.einsum("bk,nk->bn", a, w, preferred_element_type=jnp.float32),
            "x @ W.T": lambda a, w: jnp.matmul(a, w.T, preferred_element_type=jnp.float32),
            "x @ W": lambda a, w: jnp.matmul(a, w, preferred_element_type=jnp.float32),
        }
        for kind, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32)):
            rows = [(a.astype(dtype), b.astype(dtype)) for a, b in self.rows]
            columns = [(jnp.array(a.T), jnp.array(b.T)) for a, b in rows]
            for name, product in forms.items():
                weights = columns if name == "x @ W" else rows
                call = jax.jit(lambda x, a, b, product=product: ffn(x, a, b, product))
                given = x.astype(dtype)

                def run(turn, call=call, weights=weights, given=given):
                    call(given, *weights[turn % DENSE_EXPERTS]).block_until_ready()

                yield Case(f"dense {name}", kind, sum(w.nbytes for w in rows[0]), run)


class _Cache:
    """KV pages of several layers, and the same numbers of keys and values in whole arrays."""

    def __init__(self, config: ModelConfig, slots: int, context: int):
        kind = config.attention_kinds[0]
        hidden, inner, row_words = config.hidden_size, config.expert_size, kind.row_words(2)
        blocks = BlockShape(2 * inner, hidden), BlockShape(hidden, inner)
        page_words = choose_page_words(*blocks, WIDTHS, True, row_words)
        shape = slots, LAYERS, 2, ceil_div(context, page_words // row_words)
        rng = np.random.default_rng(0)
        ids = rng.permutation(np.arange(1, 1 + int(np.prod(shape))))
        # Any halves of these words are finite numbers.
        arena = jnp.array(rng.integers(0, 2**32, (len(ids) + 1, page_words), np.uint32) & 0x3BFF3BFF)
        length = jnp.full(slots, context, jnp.int32)
        self.past = Past(arena, jnp.asarray(ids.reshape(shape), jnp.int32), length)
        keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
        kv = slots, context, kind.kv_heads, kind.head_dim
        pairs = keys.reshape(LAYERS, 2)
        self.dense = [tuple(jax.random.normal(k, kv, jnp.bfloat16) for k in pair) for pair in pairs]
        self.q = jax.random.normal(keys[0], (slots, 1, config.num_heads, kind.head_dim), jnp.float32)
        self.q *= kind.head_dim**-0.5
        self.fresh = tuple(a[:, :1] for a in self.dense[0])
        self.bytes = self.dense[0][0].nbytes * 2

    def cases(self, backends: tuple[str, ...]) -> list[Case]:
        """Every form, another layer each turn."""
        return [*self._dense(), *(self._paged(name) for name in backends)]

    def _paged(self, backend: str) -> Case:
        call = jax.jit(lambda *a: paged_attention(*a, implementation=backend))
        layers = [jnp.int32(layer) for layer in range(LAYERS)]

        def run(turn):
            call(self.q, *self.fresh, 0, self.past, layers[turn % LAYERS]).block_until_ready()

        return Case(backend, 16, self.bytes, run)

    def _dense(self) -> Iterator[Case]:
        def attend(q, k, v):
            grouped = q.reshape(q.shape[0], k.shape[2], -1, q.shape[-1])
            scores = jnp.einsum("bgrd,bfgd->bgrf", grouped, k, preferred_element_type=jnp.float32)
            weights = jax.nn.softmax(scores).astype(v.dtype)
            return jnp.einsum("bgrf,bfgd->bgrd", weights, v, preferred_element_type=jnp.float32)

        for kind, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32)):
            rows = [tuple(a.astype(dtype) for a in pair) for pair in self.dense]
            call, q = jax.jit(attend), self.q[:, 0].astype(dtype)

            def run(turn, call=call, rows=rows, q=q):
                call(q, *rows[turn % LAYERS]).block_until_ready()

            yield Case("dense einsum", kind, sum(a.nbytes for a in rows[0]), run)

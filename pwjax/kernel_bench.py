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
from pallas_kernels.pages import BlockShape, Geometry, choose_page_words

# Weights in use by turns, so that none is found in a cache: many times the last level cache at any width.
PAGED_EXPERTS, DENSE_EXPERTS = 24, 8
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
        best = {
            kind: min(ms for case, ms in zip(cases, median, strict=True) if case.bits == kind)
            for kind in ("bf16", "f32")
        }
        for case, ms in zip(cases, median, strict=True):
            rows.append({
                "op": "expert_ffn",
                "shape": f"{hidden}x{inner}",
                "backend": case.name,
                "bits": case.bits,
                "tokens": n,
                "median_ms": ms,
                "speedup_vs_bf16": best["bf16"] / ms,
                "speedup_vs_f32": best["f32"] / ms,
                "bytes": case.bytes,
                "fraction_of_bandwidth": case.bytes / (ms * 1e-3) / bandwidth,
            })  # fmt: skip
    return rows


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
    """Median milliseconds of each, one call each a turn; at least five turns, at most 200."""
    for case in cases:
        case.run(0)
    times: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + seconds
    for turn in count(1):
        for case, own in zip(cases, times, strict=True):
            start = time.perf_counter()
            case.run(turn)
            own.append((time.perf_counter() - start) * 1e3)
        if turn >= 200 or (turn >= 5 and time.perf_counter() > end):
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

"""Everything that a GPU has to say about the kernels, in one run of a few minutes.

``python -m experiments.gpu.check --output results.json`` on a CUDA GPU; ``--interpret`` tries the script itself on a
CPU, with tiny shapes and no meaning in its times. Results are written after every part, so that a run that is cut
short keeps what it has. Parts that no longer fit in ``--minutes`` are left out and named.
"""

import argparse
import dataclasses
import json
import time
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.model import FINITE, RandomModel
from pallas_kernels.expert_ffn import problems
from pallas_kernels.expert_ffn.pallas_gpu import pallas_expert_ffn
from pallas_kernels.expert_ffn.reference import paged_expert_ffn
from pallas_kernels.expert_ffn.triton import triton_expert_ffn
from pallas_kernels.expert_ffn.tuning import blocks_for
from pallas_kernels.paged_attention import Past
from pallas_kernels.paged_attention.pallas_gpu import pallas_paged_attention
from pallas_kernels.paged_attention.reference import reference_paged_attention
from pallas_kernels.pages import BlockShape, Geometry, choose_page_words
from pwjax.presets import preset

# Hidden and inner size, experts kept in memory, choices of a token.
SHAPES = {"qwen": (2048, 1408, 60, 4), "gemma": (2816, 704, 128, 8), "mixtral": (4096, 14336, 8, 2)}
TINY = {"tiny": (96, 64, 4, 2)}
WIDTHS = (2, 3, 4, 5, 6)


class Layer:
    """Random pages of one layer; every word is a code, and every half a finite number."""

    def __init__(self, hidden: int, inner: int, experts: int, k: int):
        blocks = BlockShape(2 * inner, hidden, 4), BlockShape(hidden, inner, 4)
        self.geometry = Geometry(choose_page_words(*blocks, WIDTHS, True, hidden // 2), WIDTHS, True, *blocks)
        self.hidden, self.inner, self.experts, self.k = hidden, inner, experts, k
        shape = experts, 2, self.geometry.slots
        ids = np.random.default_rng(0).permutation(np.arange(1, 1 + int(np.prod(shape))))
        words = jax.random.bits(jax.random.key(0), (len(ids) + 1, self.geometry.page_words), jnp.uint32)
        self.arena, self.pages = words & jnp.uint32(FINITE), jnp.asarray(ids.reshape(shape), jnp.int32)

    def call(self, tokens: int, bits: int, seed: int = 0) -> tuple:
        """Arguments of expert_ffn."""
        keys = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(keys[0], (tokens, self.hidden), jnp.float32)
        chosen = jax.lax.top_k(jax.random.uniform(keys[1], (tokens, self.experts)), self.k)[1]
        gates = jax.random.uniform(keys[2], (tokens, self.k))
        table = jnp.full((self.experts, 2), bits, jnp.int32)
        return x, chosen, gates, jnp.ones(tokens, bool), self.arena, table, self.pages

    def bytes_read(self, chosen: jax.Array, bits: int) -> int:
        """Weight bytes of the experts that are chosen at all."""
        pages = sum(self.geometry.block_pages(m, bits) for m in (0, 1))
        return len(np.unique(np.asarray(chosen))) * pages * self.geometry.page_bytes


def median_ms(run, *args, repeats: int) -> float:
    """Median time of ``run``, in milliseconds, after one call that compiles."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def error(got, want) -> float:
    """Largest difference over the largest value."""
    return float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))


class Check:
    """The parts; each yields rows as it finds them."""

    def __init__(self, interpret: bool):
        self.interpret, self.repeats = interpret, 2 if interpret else 20
        self.shapes = TINY if interpret else SHAPES
        self.layers, self.kernels, self.bytes_per_s = {}, {}, float("nan")
        # jax-triton has kernels for few tokens; more take the reference.
        self.backends = {"pallas": partial(pallas_expert_ffn, interpret=interpret)}
        if not problems()["triton"]:
            self.backends["triton"] = triton_expert_ffn

    def layer(self, name: str) -> Layer:
        """The layer of a shape."""
        if name not in self.layers:
            # One layer at a time: Mixtral's alone takes gigabytes.
            self.layers, self.kernels = {name: Layer(*self.shapes[name])}, {}
        return self.layers[name]

    def kernel(self, layer: Layer, backend: str = "pallas", **options):
        """expert_ffn of a layer, compiled once for each number of tokens."""
        key = backend, *options.values()
        if key not in self.kernels:
            self.kernels[key] = jax.jit(partial(self.backends[backend], geometry=layer.geometry, **options))
        return self.kernels[key]

    def parity(self):
        """Every kernel against the XLA reference on fresh random inputs."""
        for name, bits, tokens in product(self.shapes, (4,) if self.interpret else (*WIDTHS, 16), (1, 16, 512)):
            if (name == "mixtral" and tokens == 512) or (self.interpret and tokens > 1):
                continue
            layer = self.layer(name)
            args = layer.call(tokens, bits, seed=bits + tokens)
            with jax.default_matmul_precision("highest"):
                want = jax.jit(partial(paged_expert_ffn, geometry=layer.geometry))(*args)
            for backend in self.backends if tokens < 512 else ("pallas",):
                got = self.kernel(layer, backend)(*args)
                y, stats = (error(a, b) for a, b in zip(got, want, strict=True))
                again = bool(jnp.all(self.kernel(layer, backend)(*args)[0] == got[0]))
                yield {"op": "expert_ffn", "backend": backend, "shape": name, "bits": bits, "tokens": tokens,
                       "error": y, "stats_error": stats, "same_again": again,
                       "good": y < 2e-3 and stats < 2e-3 and again}  # fmt: skip

    def attention(self):
        """Attention over pages against the XLA reference, and its time."""
        dims = ((4, 2, 16),) if self.interpret else ((16, 16, 128), (32, 8, 128), (16, 8, 256), (16, 2, 512))
        slots, context = (2, 40) if self.interpret else (8, 4096)
        for (heads, kv_heads, dim), queries in product(dims, (1,) if self.interpret else (1, 256)):
            row_words = kv_heads * dim // 2
            page_tokens = max(1, 11264 // row_words)
            columns = -(-context // page_tokens)
            keys = jax.random.split(jax.random.key(dim), 4)
            ids = np.random.default_rng(1).permutation(np.arange(1, 1 + slots * 2 * columns))
            arena = jax.random.bits(keys[0], (len(ids) + 1, page_tokens * row_words), jnp.uint32)
            past = Past(
                arena & jnp.uint32(0xBF7FBF7F), jnp.asarray(ids.reshape(slots, 1, 2, columns), jnp.int32),
                jnp.asarray(np.linspace(1, context, slots).astype(np.int32)),
            )  # fmt: skip
            q = jax.random.normal(keys[1], (slots, queries, heads, dim)) * dim**-0.5
            k, v = (jax.random.normal(key, (slots, queries, kv_heads, dim)).astype(jnp.bfloat16) for key in keys[2:])
            args = (q, k, v, jnp.int32(0), past, jnp.int32(0))
            with jax.default_matmul_precision("highest"):
                want = jax.jit(reference_paged_attention)(*args)
            run = jax.jit(partial(pallas_paged_attention, interpret=self.interpret))
            off = error(run(*args), want)
            yield {"op": "paged_attention", "heads": heads, "kv_heads": kv_heads, "dim": dim, "queries": queries,
                   "error": off, "good": off < 5e-3, "median_ms": median_ms(run, *args, repeats=self.repeats),
                   "xla_ms": median_ms(jax.jit(reference_paged_attention), *args, repeats=self.repeats)}  # fmt: skip

    def bandwidth(self):
        """Bytes a second of a plain copy: what all times are held against; without this part they are against none."""
        words = jnp.ones((1 << (16 if self.interpret else 28),), jnp.uint32)
        ms = median_ms(jax.jit(lambda a: a + 1), words, repeats=self.repeats)
        self.bytes_per_s = 2 * words.nbytes / (ms * 1e-3)
        yield {"op": "copy", "bytes": 2 * words.nbytes, "median_ms": ms, "bytes_per_s": self.bytes_per_s}

    def speed(self):
        """Time and bytes of expert_ffn beside a bfloat16 product of as many experts."""
        counts = (1,) if self.interpret else (1, 4, 16, 64, 512)
        for name, tokens in product(self.shapes, counts):
            layer = self.layer(name)
            dense = None
            for bits in (4,) if self.interpret else (3, 4, 5, 6, 16):
                args = layer.call(tokens, bits)
                if dense is None:
                    dense = self._dense_ms(layer, args[0], args[1])
                size = layer.bytes_read(args[1], bits)
                for backend in self.backends if tokens <= 4 else ("pallas",):
                    ms = median_ms(self.kernel(layer, backend), *args, repeats=self.repeats)
                    yield {"op": "expert_ffn", "backend": backend, "shape": name, "tokens": tokens, "bits": bits,
                           "median_ms": ms, "bytes": size, "dense_bf16_ms": dense, "speedup_vs_bf16": dense / ms,
                           "fraction_of_bandwidth": size / (ms * 1e-3) / self.bytes_per_s}  # fmt: skip

    def _dense_ms(self, layer: Layer, x: jax.Array, chosen: jax.Array) -> float:
        """gate_up and down of the chosen experts in bfloat16, each on an even share of the choices."""
        count = len(np.unique(np.asarray(chosen)))
        rows = -(-chosen.size // count)
        shapes = (count, layer.hidden, 2 * layer.inner), (count, layer.inner, layer.hidden)
        up, down = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
        x = jnp.broadcast_to(x[:1].astype(jnp.bfloat16), (count, rows, layer.hidden))

        @jax.jit
        def run(x, up, down):
            gate, value = jnp.split(x @ up, 2, -1)
            return (jax.nn.silu(gate) * value) @ down

        return median_ms(run, x, up, down, repeats=self.repeats)

    def tuning(self):
        """Sizes of the streaming kernel, one token and sixteen; the table that ships is made of the best."""
        if self.interpret:
            return
        for name, tokens, bits in product(self.shapes, (1, 16), (3, 4, 6)):
            layer = self.layer(name)
            args, base = layer.call(tokens, bits), blocks_for(layer.geometry)
            for rows, words, warps, registers in product((16, 32), (8, 16, 32), (2, 4), (3, 5)):
                blocks = dataclasses.replace(
                    base, rows=rows, words=(words, words), warps=warps, register_bits=registers
                )
                ms = median_ms(self.kernel(layer, blocks=blocks), *args, repeats=5)
                yield {"op": "expert_ffn", "shape": name, "tokens": tokens, "bits": bits, "rows": rows, "words": words,
                       "warps": warps, "register_bits": registers, "median_ms": ms}  # fmt: skip

    def transfer(self):
        """Pages from the host while steps run: time of both together beside each alone."""
        name = next(iter(self.shapes))
        layer = self.layer(name)
        args, run = layer.call(1, 4), self.kernel(layer)
        host = np.zeros((8 if self.interpret else 256, layer.geometry.page_words), np.uint32)
        steps = 2 if self.interpret else 50

        def compute():
            return [run(*args)[0] for _ in range(steps)]

        def copy():
            return jax.device_put(host.copy())

        alone = median_ms(compute, repeats=3)
        copied = median_ms(copy, repeats=3)
        both = median_ms(lambda: (copy(), compute()), repeats=3)
        yield {"op": "transfer", "bytes": host.nbytes, "copy_ms": copied, "steps": steps, "steps_ms": alone,
               "together_ms": both}  # fmt: skip


    def decode(self):
        """Tokens a second of a whole model of Qwen1.5-MoE-A2.7B's size, or a tiny one, at each width."""
        config = preset("qwen1.5-moe-a2.7b")
        if self.interpret:
            config = dataclasses.replace(
                config, num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, num_experts=4,
                expert_size=32, shared_size=64, vocab_size=128,
            )  # fmt: skip
        self.layers, self.kernels = {}, {}  # their pages would be in the way
        for slots in (1, 8):
            model = RandomModel(config, slots, past=32 if self.interpret else 1024)
            for bits in (3, 4, 6, 16):
                ms = median_ms(model.run, bits, repeats=2 if self.interpret else 5)
                yield {"layers": config.num_layers, "slots": slots, "bits": bits, "dispatch_ms": ms,
                       "pages": model.num_pages, "tokens_per_s": slots * model.tokens / (ms * 1e-3)}  # fmt: skip
            del model  # two of them would not fit


PARTS = ("bandwidth", "parity", "attention", "speed", "transfer", "decode", "tuning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on a CPU, to try this script")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.interpret:
        parser.error(f"needs a CUDA GPU, JAX has {device.platform}; --interpret tries the script itself")
    end = time.monotonic() + 60 * args.minutes
    check, rows, left_out = Check(args.interpret), [], []
    facts = {"device": device.device_kind, "jax": jax.__version__, "interpret": args.interpret,
             "date": time.strftime("%Y-%m-%d"), "triton": problems()["triton"] or "available"}  # fmt: skip

    def write() -> None:
        text = json.dumps({**facts, "left_out": left_out, "rows": rows}, indent=1) + "\n"
        args.output.write_text(text)

    for part in args.parts:
        try:
            for row in getattr(check, part)():
                rows.append({"part": part, **row})
                print(f"{end - time.monotonic():6.0f} s left  {rows[-1]}", flush=True)
                write()
                if time.monotonic() > end:
                    break
        except Exception as problem:  # one part that fails must not cost the others
            rows.append({"part": part, "good": False, "failed": f"{type(problem).__name__}: {problem}"[:2000]})
            print(rows[-1], flush=True)
        if time.monotonic() > end:
            left_out += [f"rest of {part}", *args.parts[args.parts.index(part) + 1 :]]
            break
    write()
    bad = [row for row in rows if row.get("good") is False]
    print(f"{len(rows)} rows, {len(bad)} bad, left out: {', '.join(left_out) or 'nothing'}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()

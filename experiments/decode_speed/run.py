"""How fast are tokens decoded at each width, by each backend, and by transformers?

    python -m experiments.decode_speed.run [--model DIR] [--random DIR --layers 4] [--batch 1 4 8] [--out FILE]

One engine a backend (``native`` in C++, ``xla``), each holding all experts at 16 bits; widths are plans that it is
given, so every width runs in the same compiled programs. transformers gets the same model as a bfloat16 checkpoint,
exported from the artifact. In a round every width is visited, and all arms take turns there; a ratio is the median
over turns of the two arms' rates in the same turn, or of two widths in the same round. Beside it the same ratio of the
routed experts alone: ``expert_ffn`` of one layer after another on the engine's own pages, random choices. Sixteen
prompt tokens, ``--tokens`` new ones; prefill is not counted. Needs torch and transformers (the ``hf`` extra) unless
``--no-transformers``. Memory: the 16-bit experts twice, and once more for transformers.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pwjax
from experiments import tables
from experiments.soak.random_model import make, qwen_shape
from pallas_kernels.expert_ffn import expert_ffn
from planner import uniform
from pwjax import environment

PROMPT_TOKENS = 16
BACKENDS = ("native", "xla")


class Ours:
    """One engine, its kernels from ``backend``."""

    def __init__(self, model: Path | None, backend: str, batch: int, tokens: int):
        os.environ["PWJAX_KERNELS"] = backend
        jax.clear_caches()  # a program traced for the other backend would be taken
        self.engine = pwjax.load(model, None, batch=batch, context=PROMPT_TOKENS + tokens, bits=16, prefix_cache=False)
        self.backend, self.batch, self.tokens = backend, batch, tokens
        geometry, k = self.engine.parts.pager.geometry, self.engine.config.top_k

        def layer(x, experts, arena, bits, pages):
            gates, valid = jnp.full(experts.shape, 1 / k), jnp.ones(len(x), bool)
            return expert_ffn(x, experts, gates, valid, arena, bits, pages, geometry, backend)[0]

        self._layer = jax.jit(layer)

    def at(self, bits: int) -> None:
        """Move every block to ``bits``."""
        self.engine.apply(uniform(self.engine.parts.table, bits))
        self.engine.settle(600)
        assert (self.engine.parts.pager.committed == bits).all()

    def rate(self, seed: int) -> float:
        """Tokens decoded a second."""
        rng = np.random.default_rng(seed)
        sampling = pwjax.SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        vocab = self.engine.config.vocab_size
        prompts = [rng.integers(1, vocab, PROMPT_TOKENS).tolist() for _ in range(self.batch)]
        meter = self.engine.parts.meter.decode
        tokens, seconds = meter.tokens, meter.seconds
        self.engine.generate(
            [pwjax.Request(i, prompt_token_ids=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]
        )
        return (meter.tokens - tokens) / (meter.seconds - seconds)

    def experts_ms(self, seed: int) -> float:
        """Median milliseconds of one layer's routed experts."""
        config, parts = self.engine.config, self.engine.parts
        rng, took = np.random.default_rng(seed), []
        table = parts.page_table.table
        layers = [(table.bits[i], table.pages[i]) for i in range(config.num_layers)]
        for turn in range(8 * config.num_layers):
            x = jnp.asarray(rng.standard_normal((self.batch, config.hidden_size)), jnp.float32)
            chosen = [rng.choice(config.num_experts, config.top_k, replace=False) for _ in range(self.batch)]
            experts = jnp.asarray(np.stack(chosen), jnp.int32)
            began = time.perf_counter()
            self._layer(x, experts, parts.arena.array, *layers[turn % len(layers)]).block_until_ready()
            took.append(time.perf_counter() - began)
        return 1e3 * float(np.median(took[config.num_layers :]))


class Theirs:
    """transformers on the exported checkpoint, bfloat16, greedy, with its own cache; the fastest way it has of running
    experts on this machine is found first."""

    def __init__(self, checkpoint: Path, batch: int, tokens: int):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(os.cpu_count() or 1)
        self.torch, self.batch, self.tokens = torch, batch, tokens
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        found = {}
        for way in ("eager", "batched_mm", "grouped_mm"):
            try:
                self.model.set_experts_implementation(way)
                self.rate(0, 4)
                found[way] = self.rate(0, 8)
            except (AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
                print(f"transformers cannot run experts by {way}: {error}", file=sys.stderr)
        self.ways = found
        if found:
            self.model.set_experts_implementation(max(found, key=found.__getitem__))

    def rate(self, seed: int, tokens: int | None = None) -> float:
        """Tokens decoded a second."""
        torch, tokens = self.torch, tokens or self.tokens
        generator = torch.Generator().manual_seed(seed)
        vocab = self.model.config.vocab_size
        with torch.inference_mode():
            ids = torch.randint(1, vocab, (self.batch, PROMPT_TOKENS), generator=generator)
            out = self.model(ids, use_cache=True)
            began = time.perf_counter()
            for _ in range(tokens - 1):
                ids = out.logits[:, -1:].argmax(-1)
                out = self.model(ids, past_key_values=out.past_key_values, use_cache=True)
            return self.batch * (tokens - 1) / (time.perf_counter() - began)


def turns(arms: dict[str, Callable[[int], float]], count: int) -> dict[str, list[float]]:
    """``count`` samples of each arm, taken in turns; one before them warms up."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(count + 1):
        for name, arm in arms.items():
            value = arm(turn)
            if turn:
                samples[name].append(value)
    return samples


def add(samples: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    """Append the samples of another round."""
    for name, values in more.items():
        samples.setdefault(name, []).extend(values)


def ratio(a: list[float], b: list[float]) -> float:
    """Median over turns of ``a`` over ``b``."""
    return float(np.median(np.array(a) / np.array(b)))


def measure(model: Path | None, checkpoint: Path | None, batch: int, args: argparse.Namespace) -> dict:
    """Rates and ratios at one batch size."""
    ours = {name: Ours(model, name, batch, args.tokens) for name in BACKENDS}
    theirs = Theirs(checkpoint, batch, args.tokens) if checkpoint else None
    samples, experts = {}, {}
    for _ in range(args.rounds):
        for bits in args.bits:
            for arm in ours.values():
                arm.at(bits)
            arms = {f"{name} {bits}": arm.rate for name, arm in ours.items()}
            add(samples, turns(arms | ({f"transformers {bits}": theirs.rate} if theirs else {}), args.turns))
            add(experts, turns({f"{name} {bits}": arm.experts_ms for name, arm in ours.items()}, args.turns))
    for name, values in samples.items():
        print(f"batch {batch}, {name} bits: {np.median(values):.1f} tokens/s", file=sys.stderr)
    for arm in ours.values():
        arm.engine.close()
    widest = args.bits[-1]
    return {
        "batch": batch,
        "tokens_per_s": {name: float(np.median(values)) for name, values in samples.items()},
        "experts_ms": {name: float(np.median(values)) for name, values in experts.items()},
        "native_over_xla": {b: ratio(samples[f"native {b}"], samples[f"xla {b}"]) for b in args.bits},
        "native_over_transformers": {
            b: ratio(samples[f"native {b}"], samples[f"transformers {b}"]) for b in args.bits if theirs
        },
        "native_over_widest": {b: ratio(samples[f"native {b}"], samples[f"native {widest}"]) for b in args.bits},
        "experts_over_widest": {b: ratio(experts[f"native {widest}"], experts[f"native {b}"]) for b in args.bits},
        "transformers_experts_by": theirs.ways if theirs else None,
        "samples": samples,
        "experts_samples_ms": experts,
    }


def shown(rows: list[dict], bits: list[int]) -> dict[str, str]:
    """The table, by name."""
    head = ["batch", "bits", "native, tokens/s", "xla", "transformers", "native / xla", "native / transformers",
            "native / its widest", "experts alone, / widest"]  # fmt: skip
    lines = []
    for row in rows:
        for b in bits:
            rate = row["tokens_per_s"]
            others = rate.get(f"transformers {b}")
            theirs = ("-", "-") if others is None else (f"{others:.1f}", f"{row['native_over_transformers'][b]:.2f}")
            ratios = (f"{row[name][b]:.2f}" for name in ("native_over_widest", "experts_over_widest"))
            lines.append([row["batch"], b, f"{rate[f'native {b}']:.1f}", f"{rate[f'xla {b}']:.1f}", theirs[0],
                          f"{row['native_over_xla'][b]:.2f}", theirs[1], *ratios])  # fmt: skip
    return {"decode": tables.markdown(head, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact with 16-bit rows; default: the bundled model")
    parser.add_argument("--random", type=Path, metavar="DIR", help="random weights of Qwen1.5-MoE shapes, made there")
    parser.add_argument("--layers", type=int, default=4, help="layers of --random")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4, 6, 16], help="the last is what others are over")
    parser.add_argument("--tokens", type=int, default=33, help="new tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="of every arm, at each width, in each round")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("runs/decode_speed.json"))
    args = parser.parse_args()
    environment.enable_compile_cache()
    model = args.model
    if args.random:
        model = args.random
        if not model.exists():
            make(model, qwen_shape(args.layers), fallback=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    named, checkpoint = model.name if model else "bundled", None
    if args.transformers:
        from pwjax.cli.export import export

        checkpoint = args.out.parent / f"{named}-hf"
        if not checkpoint.exists():
            export(pwjax.Artifact.open(model or pwjax.bundled_model()), checkpoint, 16)
    rows = [measure(model, checkpoint, batch, args) for batch in args.batch]
    made = shown(rows, args.bits)
    print(made["decode"])
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path | None)}
    tables.write(args.out, settings={**settings, "model": named}, load=os.getloadavg(), tables=made, rows=rows)


if __name__ == "__main__":
    main()

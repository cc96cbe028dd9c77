"""Which constants should the engine have that only its own loop shows? README.md says how.

Plays traces whose prompts share beginnings through the simulated engine of a what-if: scheduler, prefix cache, pager
and policy are the real ones, there are no weights. ``prefixes``: what a second of computing cached prompts again is
worth. Only the product of ``RANGE_PER_SECOND`` and the milliseconds that a machine needs for a prompt's token decides
what is done, so a run for every product tells of all machines. ``marks``: the paper's two thresholds of headroom.
Minutes on one core.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from planner import get_policy
from pwjax import Request, SamplingParams
from pwjax.engine.eviction import RANGE_PER_SECOND
from pwjax.engine.sequence import Completion
from pwjax.loading import open_model, outlook
from pwjax.simulate import simulated_engine

SHAPES = {"batch": 4, "context": 1024}
PREFIXES, PREFIX_TOKENS, OWN_TOKENS, NEW_TOKENS = 10, 512, 40, 80
# Shares of all precision a second, times milliseconds a token; the first always evicts, the last never.
PRODUCTS = (0.0, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1e6)
SHARES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
TOKEN_MS = (0.1, 1.0, 10.0)
MARKS = (
    (0.0, 0.1), (0.01, 0.1), (0.02, 0.1), (0.05, 0.1), (0.02, 0.06), (0.0, 0.2), (0.01, 0.2), (0.02, 0.2), (0.02, 0.3),
)  # fmt: skip


def arrivals(count: int, seed: int, vocabulary: int) -> list[tuple[int, Request]]:
    """``(step, request)``: popular beginnings come more often; bursts and quiet times."""
    rng = np.random.default_rng(seed)
    beginnings = rng.integers(1, vocabulary, (PREFIXES, PREFIX_TOKENS))
    weight = 1 / np.arange(1, PREFIXES + 1)
    out, step = [], 0
    for i in range(count):
        step += int(rng.integers(1, 8)) if i // 12 % 2 else int(rng.integers(12, 40))
        start = beginnings[rng.choice(PREFIXES, p=weight / weight.sum())]
        prompt = (*start.tolist(), *rng.integers(1, vocabulary, OWN_TOKENS).tolist())
        sampling = SamplingParams(max_tokens=int(rng.integers(10, NEW_TOKENS)), ignore_eos=True)
        out.append((step, Request(i, prompt_token_ids=prompt, sampling=sampling)))
    return out


def play(artifact, budget_bytes: int, policy: str, product: float, count: int, seed: int) -> dict[str, float]:
    """Damage a generated token (a share of that between lowest and highest bits), prompt tokens computed a request,
    steps from its arrival to its end, and what gave way."""
    view = outlook(artifact, memory_budget_bytes=budget_bytes, policy=policy, **SHAPES)
    table = view.plan.table
    span = table.total_damage(table.widths[0]) - table.total_damage(table.widths[-1])
    engine = simulated_engine(view, token_ms=1.0, damage_per_ms=product / 1000 * span)
    waiting = arrivals(count, seed, engine.config.vocab_size)
    arrived, step, damage, tokens, steps = {r.id: at for at, r in waiting}, 0, 0.0, 0, 0
    meter = engine.parts.meter
    while waiting or not engine.idle:
        if engine.idle:
            step = max(step, waiting[0][0])
        while waiting and waiting[0][0] <= step:
            engine.submit(waiting.pop(0)[1])
        before = meter.decode.tokens
        done = [event for event in engine.step() if isinstance(event, Completion)]
        assert all(completion.finish_reason == "length" for completion in done)
        new, step = meter.decode.tokens - before, step + 1
        steps += sum(step - arrived[completion.id] for completion in done)
        damage, tokens = damage + new * table.total_damage(engine.parts.pager.committed), tokens + new
    counters = engine.parts.pager.counters
    return {
        "damage": damage / tokens / span, "prompt_tokens": meter.prefill.tokens / count, "steps": steps / count,
        "evicted": engine.parts.prefixes.evicted, "preemptions": engine.scheduler.preemptions,
        "demotions": counters.demotions, "promotions": counters.promotions,
    }  # fmt: skip


def log_costs(rows: dict, names: tuple[str, str]) -> dict:
    """Logarithm of the product of two costs, a seed each: no unit joins them, so a percent of one weighs as much as a
    percent of the other."""
    return {key: sum(np.log([run[name] for run in runs]) for name in names) for key, runs in rows.items()}


def against(cost: dict, default) -> dict:
    """Cost over that of ``default``, ``(geometric mean, low, high)``: paired by seed, two standard errors."""
    found = {}
    for key, values in cost.items():
        gap = values - cost[default]
        mean, error = gap.mean(), gap.std(ddof=1) / len(gap) ** 0.5
        found[key] = [float(value) for value in np.exp([mean, mean - 2 * error, mean + 2 * error])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prefixes", "marks"))
    parser.add_argument("--model", help="quantized model; default: the bundled one")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.3, help="share of the way from the smallest to the full one")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    artifact = open_model(args.model)
    memory = outlook(artifact, **SHAPES).memory
    least = memory.smallest_budget_bytes
    budget = int(least + args.budget * (memory.total_bytes - least))

    def runs(policy: str, product: float) -> list[dict[str, float]]:
        found = [play(artifact, budget, policy, product, args.requests, seed) for seed in range(args.seeds)]
        mean = {name: np.mean([run[name] for run in found]) for name in found[0]}
        print(f"{policy} {product:g}: " + "  ".join(f"{name} {value:.4g}" for name, value in mean.items()), flush=True)
        return found

    if args.what == "prefixes":
        rows = {product: runs("default", product) for product in PRODUCTS}
        cost = log_costs(rows, ("damage", "prompt_tokens"))
        nearest = lambda share, ms: min(PRODUCTS, key=lambda product: abs(product - share * ms))  # noqa: E731
        cost = {share: np.mean([cost[nearest(share, ms)] for ms in TOKEN_MS], axis=0) for share in SHARES}
        default, unit = RANGE_PER_SECOND, f" a second, over {TOKEN_MS} ms a token"
    else:
        rows = {
            marks: runs(f"paper:offload_below={marks[0]},reload_above={marks[1]}", RANGE_PER_SECOND) for marks in MARKS
        }
        cost = log_costs(rows, ("damage", "steps"))
        policy = get_policy("paper")
        default, unit = (policy.offload_below, policy.reload_above), ""
    report = {"settings": vars(args), "default": default, "over_default": {}, "rows": {}}
    for key, (mean, low, high) in against(cost, default).items():
        report["over_default"][str(key)] = mean, low, high
        print(f"{key}{unit}: cost {mean:.3f} [{low:.3f}, {high:.3f}] of the default's")
    report["rows"] = {str(key): found for key, found in rows.items()}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How long do users wait when requests come in bursts: with precision that moves, with all blocks alike, with neither?

python experiments/burst_latency/run.py [--bursts 4] [--out FILE]

One trace of bursts, in real time, for three arms at the same budget and, for the first and the last, the same start
bits: `default`, `uniform-dynamic`, and `preemption` (no plan is ever made, so sequences are preempted when KV pages
run out). Time to first token counts from a request's arrival; time per output token is a request's mean over its
tokens after the first. Prints a table; the JSON has every request. About two minutes on two idle cores.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import pwjax
from planner import Observation, get_policy
from pwjax import environment
from pwjax.engine.decisions import Live
from pwjax.loading import Injected, load, open_model, outlook

ARMS = ("default", "uniform-dynamic", "preemption")


class NoPlans(Live):
    """Precision never moves; the engine is left with preemption."""

    def plan(self, observation: Observation) -> None:
        """Never."""
        return None


def trace(args: argparse.Namespace, vocab: int) -> list[tuple[float, pwjax.Request]]:
    """``(arrival in seconds, request)``: bursts of ``--size``, a trickle between them."""
    rng = np.random.default_rng(args.seed)
    arrivals = []
    for burst in range(args.bursts):
        at = burst * args.gap
        times = [at] * args.size + [at + args.gap * (i + 1) / (args.trickle + 1) for i in range(args.trickle)]
        for moment in times:
            length = int(rng.integers(8, args.context // 4))
            new = int(rng.integers(args.context // 4, args.context // 2))
            sampling = pwjax.SamplingParams(max_tokens=new, ignore_eos=True)
            prompt = tuple(rng.integers(1, vocab, length).tolist())
            arrivals.append((moment, pwjax.Request(len(arrivals), None, prompt, sampling)))
    return sorted(arrivals, key=lambda pair: pair[0])


def run(arm: str, args: argparse.Namespace, budget: int) -> dict:
    """Serve the trace; returns times of each request and what the engine did."""
    preemption = arm == "preemption"
    policy = "default" if preemption else arm
    injected = Injected(decisions=NoPlans(get_policy(policy))) if preemption else None
    with load(args.model, budget, batch=args.batch, context=args.context, policy=policy, injected=injected) as engine:
        arrivals = trace(args, engine.parts.shapes.config.vocab_size)
        first: dict[int, float] = {}
        latest: dict[int, tuple[float, int]] = {}
        began, sent = time.perf_counter(), 0
        while sent < len(arrivals) or not engine.idle:
            now = time.perf_counter() - began
            while sent < len(arrivals) and arrivals[sent][0] <= now:
                engine.submit(arrivals[sent][1])
                sent += 1
            if engine.idle:
                time.sleep(max(0.0, arrivals[sent][0] - now))
                continue
            running = engine.scheduler.running
            engine.step()
            now = time.perf_counter() - began
            for sequence in {id(s): s for s in (*running, *engine.scheduler.running)}.values():
                key, count = int(sequence.request.id), len(sequence.generated)
                if count and key not in first:
                    first[key] = now
                if count > latest.get(key, (0.0, 0))[1]:
                    latest[key] = now, count
        stats = engine.stats()
    requests = [
        {
            "id": request.id,
            "arrival_s": at,
            "ttft_ms": 1e3 * (first[request.id] - at),
            "tpot_ms": 1e3 * (latest[request.id][0] - first[request.id]) / max(1, latest[request.id][1] - 1),
            "tokens": latest[request.id][1],
        }
        for at, request in arrivals
    ]
    return {
        "requests": requests,
        "seconds": time.perf_counter() - began,
        "preemptions": stats["scheduler"]["preemptions"],
        "precision": stats["precision"],
        "memory": stats["memory"],
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Median and tails."""
    return {f"p{q}": round(float(np.percentile(values, q)), 2) for q in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--size", type=int, default=16, help="requests of a burst")
    parser.add_argument("--trickle", type=int, default=3, help="requests between two bursts")
    parser.add_argument("--gap", type=float, default=8.0, help="seconds between bursts")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--budget", type=float, default=0.25, help="0: the smallest that works, 1: the largest of use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/burst_latency.json"))
    args = parser.parse_args()
    environment.enable_compile_cache()
    memory = outlook(open_model(args.model), batch=args.batch, context=args.context).memory
    budget = int(memory.smallest_budget_bytes + args.budget * (memory.total_bytes - memory.smallest_budget_bytes))
    arms = {arm: run(arm, args, budget) for arm in ARMS}
    table = {
        arm: {
            "tpot_ms": quantiles([r["tpot_ms"] for r in result["requests"]]),
            "ttft_ms": quantiles([r["ttft_ms"] for r in result["requests"]]),
            "preemptions": result["preemptions"],
            "mean_bits_start": round(result["precision"]["mean_bits_start"], 2),
            "mean_bits_min": round(result["precision"]["mean_bits_min"], 2),
            "seconds": round(result["seconds"], 1),
        }
        for arm, result in arms.items()
    }
    lines = ["| arm | ms a token p50 / p90 / p99 | ms to first token p50 / p90 / p99 | preemptions | mean bits |",
             "|---|---|---|---|---|"]  # fmt: skip
    for arm, row in table.items():
        tpot, ttft = (" / ".join(f"{v:.1f}" for v in row[name].values()) for name in ("tpot_ms", "ttft_ms"))
        bits = f"{row['mean_bits_start']} -> {row['mean_bits_min']}"
        lines.append(f"| {arm} | {tpot} | {ttft} | {row['preemptions']} | {bits} |")
    print("\n".join(lines))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    result = {
        "command": " ".join(sys.argv), "settings": settings, "budget_bytes": budget, "table": table, "arms": arms,
        "cpu": environment.cpu_info(), "versions": environment.versions(),
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

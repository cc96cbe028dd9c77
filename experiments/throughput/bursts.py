"""How long do users wait when requests come in bursts, by policy, and where precision never moves?

    python -m experiments.throughput.bursts [--bursts 4] [--arms default preemption] [--out FILE]

One trace of bursts, in real time, at one budget, for every policy and for `preemption`: the start bits of `default`,
and never a plan, so sequences are preempted when KV pages run out. Time to first token counts from a request's arrival;
time per output token is a request's mean over its tokens after the first; tokens a second are those of all requests
over the time in which the engine had any. Prints a table; the JSON has every request. Half a minute an arm on two idle
cores.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import pwjax
from experiments import tables
from planner import Observation, get_policy
from pwjax import environment
from pwjax.engine.decisions import Live
from pwjax.loading import Injected, load, open_model, outlook

ARMS = ("default", "paper", "uniform-dynamic", "static", "uniform", "preemption")
QUANTILES = (50, 90, 99)


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
        seconds, stats = time.perf_counter() - began, engine.stats()
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
        "seconds": seconds,
        "preemptions": stats["scheduler"]["preemptions"],
        "precision": stats["precision"],
        "memory": stats["memory"],
    }


def busy_s(requests: list[dict]) -> float:
    """Seconds in which at least one request was there and not done."""
    spans = sorted(
        (r["arrival_s"], r["arrival_s"] + (r["ttft_ms"] + r["tpot_ms"] * (r["tokens"] - 1)) / 1e3) for r in requests
    )
    total = reached = 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def summary(arms: dict[str, dict]) -> dict[str, dict]:
    """Rates, percentiles in milliseconds, preemptions and bits of every arm."""
    quantiles = lambda values: {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}  # noqa: E731
    return {
        arm: {
            "tokens_per_s": sum(r["tokens"] for r in result["requests"]) / busy_s(result["requests"]),
            "tpot_ms": quantiles([r["tpot_ms"] for r in result["requests"]]),
            "ttft_ms": quantiles([r["ttft_ms"] for r in result["requests"]]),
            "preemptions": result["preemptions"],
            "mean_bits_start": result["precision"]["mean_bits_start"],
            "mean_bits_min": result["precision"]["mean_bits_min"],
        }
        for arm, result in arms.items()
    }


def shown(found: dict[str, dict]) -> dict[str, str]:
    """The table, by name."""
    spread = lambda row: " / ".join(f"{v:.1f}" for v in row.values())  # noqa: E731
    head = ["arm", "tokens/s", "ms a token p50 / p90 / p99", "ms to first token p50 / p90 / p99", "preemptions",
            "mean bits, start to least"]  # fmt: skip
    rows = [
        [f"`{arm}`", f"{row['tokens_per_s']:.0f}", spread(row["tpot_ms"]), spread(row["ttft_ms"]), row["preemptions"],
         f"{row['mean_bits_start']:.2f} -> {row['mean_bits_min']:.2f}"]
        for arm, row in found.items()
    ]  # fmt: skip
    return {"bursts": tables.markdown(head, rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="policies, and preemption")
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--size", type=int, default=16, help="requests of a burst")
    parser.add_argument("--trickle", type=int, default=3, help="requests between two bursts")
    parser.add_argument("--gap", type=float, default=8.0, help="seconds between bursts")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--budget", type=float, default=0.25, help="0: the smallest that works, 1: the largest of use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bursts.json"), help="arms in it stay")
    args = parser.parse_args()
    environment.enable_compile_cache()
    artifact = open_model(args.model)
    memory = outlook(artifact, batch=args.batch, context=args.context).memory
    budget = int(memory.smallest_budget_bytes + args.budget * (memory.total_bytes - memory.smallest_budget_bytes))
    asked = {name: value for name, value in vars(args).items() if name not in ("model", "arms", "out")}
    settings = {**asked, "model": artifact.path.name, "budget_bytes": budget}
    before = tables.read(args.out) if args.out.exists() else {"settings": settings, "arms": {}}
    if before["settings"] != settings:
        sys.exit(f"{args.out} holds arms of other settings; give another --out")
    arms = before["arms"]
    for arm in args.arms:
        if arm not in arms:
            arms[arm] = run(arm, args, budget)
            print(f"{arm}: {arms[arm]['seconds']:.0f} s", file=sys.stderr, flush=True)
        found = summary(arms)
        made = shown(found)
        tables.write(args.out, settings=settings, summary=found, tables=made, arms=arms)
    print(made["bursts"])


if __name__ == "__main__":
    main()

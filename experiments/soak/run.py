"""Does an engine under hours of mixed load leak, recompile, break its budget, or do anything that a replay does not?

    python -m experiments.soak.run [--model DIR | --qwen-shape DIR] [--minutes 30] [--out FILE]

Serves requests of mixed lengths in quiet times and bursts for ``--minutes``, cancels some, and lets a share of the
page reads fail, come short or come late. Then everything is drained and checked, and the whole run is replayed from
its log (about as long again, on the bundled model less). ``--qwen-shape`` makes the random model of
``random_model.py`` in DIR first if it is not there. Exit code 1 where a check fails; the JSON has every figure.
"""

import argparse
import gc
import json
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

import pwjax
from experiments.soak.random_model import make, qwen_shape
from pwjax import environment
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.replay import replay
from pwjax.engine.sequence import Completion
from pwjax.loading import Injected, load, open_model, outlook
from pwjax.memory import ThreadTransfer
from pwjax.memory.faults import FaultyStore

# Share of the run after which host memory must be flat, and by how much it may still grow.
WARM, GROWTH = 0.2, 0.05


class Traffic:
    """Random requests: lengths log-uniform, half of them sampled; ``rate`` a turn, and a burst of twice the slots now
    and then."""

    def __init__(self, rng: np.random.Generator, vocab: int, context: int, slots: int, longest: int, rate: float):
        self.rng, self.vocab, self.slots, self.rate = rng, vocab, slots, rate
        self.longest = min(longest, context)
        self.sent = 0

    def request(self) -> pwjax.Request:
        """One request."""
        rng = self.rng
        length = int(2 ** rng.uniform(0, np.log2(self.longest * 0.6)))
        new = int(2 ** rng.uniform(2, np.log2(self.longest * 0.6)))
        sampling = pwjax.SamplingParams(
            max_tokens=new, ignore_eos=True, temperature=float(rng.choice([0.0, 0.8])), top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1.0, 0.9])), seed=int(rng.integers(2**31)),
        )  # fmt: skip
        self.sent += 1
        return pwjax.Request(self.sent, None, tuple(rng.integers(1, self.vocab, length).tolist()), sampling)

    def arrivals(self, waiting: int) -> list[pwjax.Request]:
        """What comes before a turn while ``waiting`` requests are queued."""
        if waiting > 3 * self.slots:
            return []
        draw = self.rng.random()
        count = 2 * self.slots if draw < 0.002 else int(draw < self.rate) if waiting < self.slots else 0
        return [self.request() for _ in range(count)]


def budget_between(artifact: Artifact, position: float, **shapes) -> int:
    """Bytes between the smallest budget (0) and that of full precision and full contexts (1)."""
    memory = outlook(artifact, **shapes).memory
    low, high = memory.smallest_budget_bytes, memory.total_bytes
    return int(low + position * (high - low))


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def serve(engine: pwjax.Engine, traffic: Traffic, seconds: float, faulty: FaultyStore, tell) -> dict:
    """Run the load for ``seconds``, then drain; returns what was measured on the way."""
    rng, scheduler = traffic.rng, engine.scheduler
    began = last = time.perf_counter()
    rss, done, cancelled, steps = [], 0, 0, 0
    faulty.armed = True
    while True:
        now = time.perf_counter()
        if now - began < seconds:
            for request in traffic.arrivals(len(scheduler.waiting)):
                engine.submit(request)
            if rng.random() < 0.002 and scheduler.running:
                victim = scheduler.running[int(rng.integers(len(scheduler.running)))]
                cancelled += len(engine.cancel([victim.request.id]))
        elif engine.idle:
            break
        if engine.idle:
            engine.submit(traffic.request())
        done += sum(isinstance(event, Completion) for event in engine.step())
        steps += 1
        if now - last > max(1.0, seconds / 600):
            last = now
            rss.append((round(now - began, 1), rss_bytes()))
            engine.parts.pager.check_invariants()
            engine.parts.kv.check_invariants()
            tell(f"{now - began:.0f} s: {steps} turns, {done} requests, {rss[-1][1] / 2**20:.0f} MiB")
    faulty.armed = False
    engine.settle()
    return {"steps": steps, "finished": done, "cancelled": cancelled, "rss": rss, "serving_s": last - began}


def growth(rss: list[tuple[float, int]]) -> float:
    """How much host memory grew after the warm-up: highest of the last third over highest up to the warm-up's end."""
    if len(rss) < 6:
        return 0.0
    early = [b for _, b in rss[: max(2, int(len(rss) * (WARM + 0.1)))]]
    late = [b for _, b in rss[-len(rss) // 3 :]]
    return max(late) / max(early) - 1


def soak(model: Path | None, args: argparse.Namespace, log: Path, tell) -> dict:
    """One soak of one model, with its replay; returns the result."""
    artifact = open_model(model)
    context = min(args.context, artifact.config.max_positions)
    shapes = {"batch": args.batch, "context": context, "kv_dtype": args.kv_dtype}
    budget = budget_between(artifact, args.budget, **shapes)
    gc.collect()
    before = {"threads": threading.active_count(), "arrays": {id(a) for a in jax.live_arrays()}}
    stores: list[FaultyStore] = []

    def transfer(store):
        stores.append(FaultyStore(store, args.faults, args.seed))
        return ThreadTransfer(stores[0])

    with load(model, budget, **shapes, log=log, injected=Injected(transfer=transfer)) as engine:
        parts = engine.parts
        traffic = Traffic(
            np.random.default_rng(args.seed), artifact.config.vocab_size, context, parts.shapes.slots, args.longest,
            args.rate,
        )  # fmt: skip
        measured = serve(engine, traffic, args.minutes * 60, stores[0], tell)
        stats = engine.stats()
        weights = parts.table.total_pages(parts.pager.committed)
        arena_bytes = parts.memory.arena_bytes
    # What stays cached is no leak. Behind the last record of the log: a replay does not evict it.
    parts.prefixes.evict()
    left = {"kv_pages": parts.kv.used_pages, "other_pages": parts.allocator.used_pages - int(weights)}
    del engine, parts, traffic
    gc.collect()
    left["threads"] = threading.active_count() - before["threads"]
    left["arrays"] = sum(id(a) not in before["arrays"] and not a.is_deleted() for a in jax.live_arrays())
    rss, memory = measured.pop("rss"), stats["memory"]
    checks = {
        "no page, thread or array is left": not any(left.values()),
        "host memory is flat": growth(rss) <= GROWTH,
        "nothing was recompiled": stats["compile"]["recompiles_after_warmup"] == 0,
        "the budget was never exceeded": memory["peak_bytes"] <= memory["budget_bytes"],
    }
    tell("replaying")
    began = time.perf_counter()
    try:
        again = {**replay(log).__dict__, "error": None}
    except pwjax.PWJaxError as error:
        again = {"error": str(error)}
    again["seconds"] = round(time.perf_counter() - began, 1)
    ended = measured["finished"] + measured["cancelled"]
    checks["every request equals its replay"] = again["error"] is None and again["requests"] == ended
    return {
        "checks": checks, "left": left, "arena_bytes": arena_bytes, "log_bytes": log.stat().st_size,
        "rss_growth": round(growth(rss), 4), "rss_mib": [[t, b >> 20] for t, b in rss], **measured,
        "faults": stores[0].faults, "replay": again, "stats": stats,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--qwen-shape", type=Path, metavar="DIR", help="random weights of that shape, made there")
    parser.add_argument("--layers", type=int, default=4, help="layers of --qwen-shape")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest request")
    parser.add_argument("--budget", type=float, default=0.15, help="0: the smallest that works, 1: the largest of use")
    parser.add_argument("--rate", type=float, default=0.05, help="requests that come a turn")
    parser.add_argument("--kv-dtype", default="bfloat16", help="type of the KV cache")
    parser.add_argument("--faults", type=float, default=0.02, help="share of page reads that go wrong")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="epoch log; default: beside --out")
    parser.add_argument("--out", type=Path, default=Path("runs/soak.json"))
    args = parser.parse_args()
    environment.enable_compile_cache()
    model = args.model
    if args.qwen_shape:
        model = args.qwen_shape
        if not model.exists():
            make(model, qwen_shape(args.layers))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    log = args.log or args.out.with_suffix(".log.jsonl")
    result = soak(model, args, log, lambda text: print(text, file=sys.stderr))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    text = json.dumps({"settings": settings, "cpu": environment.cpu_info(), **result}, indent=1)
    args.out.write_text(text + "\n")
    print(json.dumps(result["checks"], indent=1))
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Which constants should the policies have? Random search by predicted damage; README.md beside it says how.

About two minutes for 60 trials a policy on one core.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from planner import BlockTable, FloorRule, Observation, get_policy, price
from pwjax.loading import open_model

ROUTING = Path(__file__).parents[1] / "train_demo" / "results" / "routing.json"
CHOOSING, HELD_OUT = ("prose", "code"), ("math",)
BOUNDARIES, LATENCY, TOKENS, HALF_LIFE = 96, 2, 32, 1024
SPACES = {
    "paper": {
        "quantiles": [(0.5, 0.9), (0.33, 0.67), (0.7, 0.95)],
        "multipliers": [(1.0, 1.0, 1.0), (0.7, 1.0, 1.4), (0.5, 1.0, 2.0), (0.25, 1.0, 4.0), (0.5, 1.0, 1.0)],
        "floor_levels": [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)],
        "depth": [1, 2, 3, 5],
        "period": [1, 2, 4, 8, 16],
    },
    "default": {
        "floors": [FloorRule(q) for q in ((0.5, 0.9), (0.9,), (0.8, 0.95), ())],
        "depth": [None, 1, 2, 3],
        "pseudo_choices": [4.0, 16.0, 64.0, 256.0],
    },
}


def demand(kind: str, most: int) -> np.ndarray:
    """Pages that KV wants at every boundary, int64[BOUNDARIES]."""
    at = np.linspace(0, 1, BOUNDARIES)
    shapes = {
        "ramp": at,
        "bursts": ((at * 4) % 1 < 0.5) * (0.4 + 0.6 * at),
        "tide": 0.5 - 0.5 * np.cos(2 * np.pi * at * 1.5),
    }
    return (most * shapes[kind]).astype(int)


def play(table: BlockTable, policy, kind: str, domain: np.ndarray, seed: int) -> float:
    """Mean damage a served token over a trace in which the text turns to ``domain`` [layers, experts] midway."""
    rng, capacity = np.random.default_rng(seed), int(1.15 * table.total_pages(5))
    wanted = demand(kind, capacity - int(1.05 * table.total_pages(table.widths[0])))
    bits = policy.initial(table, capacity, capacity // 10).bits.copy()
    moving, landing = np.zeros(table.blocks, bool), []
    mass, tokens, kv, damage = np.zeros(domain.shape), 0.0, 0, []
    for boundary in range(BOUNDARIES):
        for _, change in (m for m in landing if m[0] == boundary):
            bits[change.block], moving[change.block] = change.to_bits, False
        landing = [m for m in landing if m[0] > boundary]
        coming = [change.pages for _, change in landing]
        free = capacity - table.total_pages(bits) - sum(p for p in coming if p > 0)
        kv = min(int(wanted[boundary]), max(free, 0))
        true = table.usage if boundary < BOUNDARIES // 3 else domain
        seen = np.stack([rng.multinomial(TOKENS * 4, row / row.sum()) for row in true])
        kept = 0.5 ** (TOKENS / HALF_LIFE)
        mass, tokens = kept * mass + seen, kept * tokens + TOKENS
        plan = policy.step(Observation(
            bits.copy(), moving.copy(), free - kv, 0, boundary,
            routing_mass=mass, routing_choices=mass, routing_tokens=tokens,
            blocked_pages=int(wanted[boundary]) - kv, releasing_pages=-sum(p for p in coming if p < 0),
            tokens=TOKENS * boundary, turn_pages=2 * table.layers,
        ))  # fmt: skip
        for change in plan.changes() if plan else []:
            moving[change.block] = True
            landing.append((boundary + LATENCY, change))
        each = price(table, true).damage
        # Demand that was not met is as bad as text at the lowest bits for its share.
        short = (int(wanted[boundary]) - kv) / max(int(wanted[boundary]), 1)
        now = float(each[np.arange(table.blocks), table.level(bits)].sum())
        damage.append((1 - short) * now + short * float(each[:, 0].sum()))
    return float(np.mean(damage))


def score(table, name: str, options: dict, domains: dict, names, base: dict, seeds: int) -> float:
    """Geometric mean of damage over that of ``uniform-dynamic``, over domains, traces and seeds."""
    ratios = []
    for domain in names:
        for kind in ("ramp", "bursts", "tide"):
            for seed in range(seeds):
                key = domain, kind, seed
                if key not in base:
                    base[key] = play(table, get_policy("uniform-dynamic"), kind, domains[domain], seed)
                ratios.append(play(table, get_policy(name, **options), kind, domains[domain], seed) / base[key])
    return float(np.exp(np.mean(np.log(ratios))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="quantized model; default: the bundled one, whose routing the traces have")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    artifact = open_model(args.model)
    shares = json.loads(ROUTING.read_text())["shares"]
    domains = {name: np.array(shares[name]) for name in (*CHOOSING, *HELD_OUT)}
    report = {"settings": vars(args), "policies": {}}
    for name, space in SPACES.items():
        table = artifact.table(preferred=get_policy(name).damage_form)
        rng, base = np.random.default_rng(0), {}
        tried = [{}] + [{k: v[rng.integers(len(v))] for k, v in space.items()} for _ in range(args.trials)]
        scores = [score(table, name, options, domains, CHOOSING, base, args.seeds) for options in tried]
        order = np.argsort(scores, kind="stable")
        best = tried[order[0]]
        held = {"defaults": score(table, name, {}, domains, HELD_OUT, base, args.seeds),
                "best": score(table, name, best, domains, HELD_OUT, base, args.seeds)}  # fmt: skip
        print(f"{name}: defaults {scores[0]:.4f}, best {scores[order[0]]:.4f}; "
              f"held out {held['defaults']:.4f} and {held['best']:.4f}", flush=True)  # fmt: skip
        for i in order[:5]:
            print(f"   {scores[i]:.4f}  {tried[i]}")
        report["policies"][name] = {
            "defaults": scores[0], "best": scores[order[0]], "held_out": held,
            "top": [{"score": scores[i], "options": {k: str(v) for k, v in tried[i].items()}} for i in order[:10]],
        }  # fmt: skip
    report["baselines"] = {}
    table, base = artifact.table(), {}
    for name in ("static", "hotness", "random", "default:routing=off", "default:sensitivity=off"):
        report["baselines"][name] = score(table, name, {}, domains, (*CHOOSING, *HELD_OUT), base, args.seeds)
        print(f"{name:<24} {report['baselines'][name]:.4f} (all texts)")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

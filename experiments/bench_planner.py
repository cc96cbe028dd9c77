"""How long does one full planning step take, and how far from the optimum is its plan?

A step is what a policy does at a boundary under pressure: damage under the routing and prompts of the moment, floors
and stages, hull, greedy and improvement; the paper's policy plans every stage of its queue. Tables are random with
heavy tails, of the sizes of published models, at 3, 4, 5, 6 and 16 bits, with pages as in their geometry; that of the
default policy knows three texts apart. Seconds of the one thread that plans (CPU time). A minute; --gap adds the
distance to an exact solver (minutes).

    python experiments/bench_planner.py --gap 20 --json results.json
"""

import argparse
import json
import platform
import time
from dataclasses import replace

import numpy as np

from planner import BlockTable, Observation, ResidualHeads, TextKinds, get_policy
from planner.solve import demote, fit

WIDTHS = (3, 4, 5, 6, 16)
# Layers, experts, pages of a plane of gate_up and down, pages of LUT3..6 of both.
MODELS = {
    "Qwen1.5-MoE-A2.7B": (24, 60, (16, 8), ((1, 2, 3, 6), (1, 1, 2, 3))),
    "Gemma-4-26B-A4B": (30, 128, (16, 8), ((1, 2, 3, 6), (2, 3, 6, 11))),
}
TARGET_MS = {"Qwen1.5-MoE-A2.7B": 10.0, "Gemma-4-26B-A4B": 25.0}


def random_table(layers: int, experts: int, planes, luts, seed: int) -> BlockTable:
    """Heavy-tailed, nearly geometric damage, as calibration finds it."""
    rng = np.random.default_rng(seed)
    n, down = layers * experts * 2, np.arange(layers * experts * 2) % 2
    pages = np.array(planes)[down][:, None] * np.array(WIDTHS)
    pages[:, :-1] += np.array(luts)[down]
    damage = np.exp(rng.normal(0, 2, (n, 1))) * 4.0 ** -np.array(WIDTHS) * np.exp(rng.normal(0, 0.3, (n, len(WIDTHS))))
    damage = np.sort(damage, axis=1)[:, ::-1].copy()
    damage[:, -1] = 0
    shape = (2, len(WIDTHS) - 1)
    heads = ResidualHeads(rng.normal(0, 0.1, (*shape, 4)), np.full(shape, 0.5), np.full(shape, -1), np.full(shape, 1))
    return BlockTable(
        layers, experts, WIDTHS, damage, pages, np.where(down, 1, 2) * 10**6, rng.dirichlet(np.ones(experts), layers),
        floors=np.where(rng.random(n) < 0.01, 5, 3), heads=heads,
    )  # fmt: skip


def with_texts(table: BlockTable, seed: int, texts: int = 3) -> BlockTable:
    """The table as calibration makes it of several texts, which use different experts."""
    rng = np.random.default_rng(seed)
    mass = rng.dirichlet(np.ones(table.experts), (texts, table.layers))
    damage = table.damage * np.exp(rng.normal(0, 0.5, (texts, table.blocks, 1)))
    return replace(table, conditional=True, kinds=TextKinds(damage, mass), routing_mass=mass.mean(0))


def measure(table: BlockTable, name: str, repeats: int, seed: int) -> dict:
    """Milliseconds of demoting and promoting steps, each of a new observation."""
    rng, times = np.random.default_rng(seed), {"demote": [], "promote": []}
    capacity = table.total_pages(5)
    for repeat in range(repeats):
        for kind, free, growth in (("demote", 0, capacity // 20), ("promote", capacity // 3, 0)):
            policy = get_policy(name, **({"residence": 0} if name == "default" else {}))
            plan = policy.initial(table, capacity, capacity // 10)
            bits = plan.bits if kind == "demote" else np.full(table.blocks, 4)
            mass = rng.dirichlet(np.ones(table.experts), table.layers)
            seen = Observation(
                bits, rng.random(table.blocks) < 0.01, free, growth, repeat,
                routing_mass=mass, routing_choices=mass, routing_tokens=500.0, residual=rng.random((table.blocks, 4)),
            )  # fmt: skip
            began = time.thread_time()
            plan = policy.step(seen)
            times[kind].append((time.thread_time() - began) * 1e3)
            assert plan is not None and plan.moves
    return {kind: {"median_ms": float(np.median(t)), "p90_ms": float(np.quantile(t, 0.9))} for kind, t in times.items()}


def gaps(table: BlockTable, count: int, seed: int) -> dict:
    """Damage of plans over a lower bound of the exact solver, minus 1: demotions and static plans in turn."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import block_diag, csr_matrix

    n, width = table.pages.shape
    rng, found = np.random.default_rng(seed), []
    each = LinearConstraint(block_diag([np.ones((1, width))] * n, format="csr"), 1, 1)
    for i in range(count):
        share = rng.uniform(0.05, 0.95)
        low, high = table.total_pages(WIDTHS[0]), table.total_pages(6)
        limit = int(low + share * (high - low))
        if i % 2:
            plan, top = fit(table, limit), n * [width]
        else:
            plan, top = demote(table, np.full(n, 6), high - limit), n * [width - 1]
        allowed = np.arange(width) < np.array(top)[:, None]
        within = LinearConstraint(csr_matrix(table.pages.reshape(1, -1)), -np.inf, limit)
        scale = plan.damage or 1.0
        exact = milp(
            table.damage.ravel() / scale, integrality=1, bounds=(0, allowed.ravel().astype(float)),
            constraints=[each, within], options={"mip_rel_gap": 1e-4, "time_limit": 60},
        )  # fmt: skip
        found.append(1 / exact.mip_dual_bound - 1)
    return {"plans": count, "median": float(np.median(found)), "largest": float(max(found))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=int, default=0, metavar="N", help="plans a model to compare with an exact solver")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    report = {"settings": vars(args), "machine": platform.processor(), "numpy": np.__version__, "models": {}}
    for model, (layers, experts, planes, luts) in MODELS.items():
        table = random_table(layers, experts, planes, luts, args.seed)
        row = {"blocks": table.blocks, "target_ms": TARGET_MS[model]}
        for name in ("default", "paper"):
            own = with_texts(table, args.seed) if name == "default" else table
            row[name] = measure(own, name, args.repeats, args.seed)
            for kind, times in row[name].items():
                print(f"{model:<20} {table.blocks} blocks  {name:<8} {kind:<8} "
                      f"median {times['median_ms']:6.2f} ms, p90 {times['p90_ms']:6.2f} ms")  # fmt: skip
        if args.gap:
            row["gap"] = gaps(table, args.gap, args.seed)
            print(f"{model:<20} gap to the exact solver's bound: median {row['gap']['median']:.2e}, "
                  f"largest {row['gap']['largest']:.2e} over {args.gap} plans")  # fmt: skip
        report["models"][model] = row
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()

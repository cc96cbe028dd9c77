"""What is each layer of the planner worth?

    python -m experiments.ablation.run --data DIR [--bits 2.5 3 3.5] [--model DIR] [--out FILE]

The default policy as it is, and with one layer taken away: online routing, prompt residual, movement, sensitivity. All
at equal peak bytes on the same windows; the paired difference to the full form with a bootstrap interval, pooled over
budgets and at each. The paper's order (its Table of ablations, perplexity): full 7.22, without routing 7.26, without
residual 7.31, without movement 7.43, without sensitivity 7.46. Runs in --out are not made again.
"""

import numpy as np

from calib.agreement import bootstrap
from experiments.arms import Arm, Runs, interval, markdown, options

LAYERS = ("routing", "residual", "movement", "sensitivity")
FULL = Arm("default")


def pooled(runs: Runs, arm: Arm, bits: list[float]) -> dict:
    """Difference to the full form over all budgets: a window is one sample, whatever its budgets."""
    first, second = ([runs.pooled(a, b) for b in bits] for a in (arm, FULL))
    excess = sum(a["nll"] - b["nll"] for a, b in zip(first, second, strict=True))
    tokens = sum(a["tokens"] for a in first)
    limits = bootstrap(lambda i: excess[i].sum(1) / tokens[i].sum(1), len(excess), runs.args.seed)
    return {"difference": float(np.sum(excess) / np.sum(tokens)), "interval_95": list(limits)}


def main() -> None:
    parser = options(__doc__, "runs/ablation.json")
    parser.add_argument("--bits", type=float, nargs="+", default=[2.5, 3.0, 3.5], help="budgets")
    args = parser.parse_args()
    runs = Runs(args)
    arms = {f"without {layer}": Arm(f"default:{layer}=off") for layer in LAYERS}
    found = {
        name: {**{f"{b:g}": runs.difference(arm, FULL, b) for b in args.bits}, "all": pooled(runs, arm, args.bits)}
        for name, arm in arms.items()
    }
    columns = [*(f"{b:g}" for b in args.bits), "all"]
    full = [f"{runs.mean(runs.pooled(FULL, b)):.4f}" for b in args.bits]
    print(markdown(["nats a token more than the full form", *columns], [
        ["(full: nats a token)", *full, ""],
        *([name, *(interval(row[column]) for column in columns)] for name, row in found.items()),
    ]))  # fmt: skip
    runs.save(versus_full=found)


if __name__ == "__main__":
    main()

"""How much quality does each policy keep at equal peak bytes?

    python -m experiments.quality_memory.run --data DIR [--bits 2.5 3 3.5 4 5] [--model DIR] [--out FILE]

Every policy scores the same windows of held-out text while the KV cache of a batch grows beside them, under budgets in
which all experts at N bits and the full cache just fit. Prints the likelihood of every arm, the paired difference of
`default` to each other one with a bootstrap interval, and the share of the gap between uniform 3 bit and 16 bit that
`default` recovers in the bytes of uniform 3 bit, and in 85 % of them. A quarter of an hour on two cores with the
bundled model; a run that was stopped goes on.
"""

import numpy as np

from experiments.arms import Arm, Runs, interval, markdown, options

POLICIES = ("default", "paper", "uniform", "uniform-dynamic", "static", "hotness", "random")
DEFAULT, FULL = Arm("default"), Arm(bits=16)


def recovered(runs: Runs, bits: float, narrow: int, seed: int) -> dict:
    """Share of the gap between experts at ``narrow`` and at 16 bits that `default` closes at a budget of ``bits``."""
    low, full = runs.pooled(Arm(bits=narrow), float(narrow)), runs.pooled(FULL, None)
    ours = runs.pooled(DEFAULT, bits)
    index = np.random.default_rng(seed).integers(0, len(ours["nll"]), (4000, len(ours["nll"])))
    share = lambda i: (low["nll"][i] - ours["nll"][i]).sum(-1) / (low["nll"][i] - full["nll"][i]).sum(-1)  # noqa: E731
    limits = [float(v) for v in np.quantile(share(index), (0.025, 0.975))]
    return {"share": float(share(np.arange(len(ours["nll"])))), "interval_95": limits}


def main() -> None:
    parser = options(__doc__, "runs/quality_memory.json")
    parser.add_argument("--bits", type=float, nargs="+", default=[2.5, 3.0, 3.5, 4.0, 5.0], help="budgets")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    args = parser.parse_args()
    runs = Runs(args)
    arms = [Arm(policy) for policy in args.policies]
    rows, versus = [], {}
    full = runs.mean(runs.pooled(FULL, None))
    for bits in args.bits:
        # An arm that cannot keep the promise at all (its least bits do not fit) has no row.
        nats = {arm.name: runs.mean(runs.pooled(arm, bits)) for arm in arms}
        rows.append([f"{bits:g}", *(f"{nats[arm.name]:.4f}" for arm in arms)])
        for arm in arms[1:]:
            versus[f"{arm.name} | {bits:g}"] = runs.difference(DEFAULT, arm, bits)
    print(markdown(["budget, bits at the peak", *(arm.name for arm in arms)], rows))
    print(f"\n16 bits: {full:.4f} nats a token\n")
    others = [arm.name for arm in arms[1:]]
    print(markdown(["`default` less", *(f"{bits:g}" for bits in args.bits)], [
        [name, *(interval(versus[f"{name} | {bits:g}"]) for bits in args.bits)] for name in others
    ]))  # fmt: skip
    by_text = {
        name: {f"{bits:g}": runs.difference(DEFAULT, Arm("uniform-dynamic"), bits, [name]) for bits in args.bits}
        for name in runs.texts
    }
    shares = {}
    if 3.0 in args.bits:
        shares["3 bits' bytes"] = recovered(runs, 3.0, 3, args.seed)
        print(f"\nof the gap between 3 and 16 bits, in the bytes of 3 bits: {shares}")
    runs.save(versus=versus, by_text=by_text, recovered=shares)


if __name__ == "__main__":
    main()

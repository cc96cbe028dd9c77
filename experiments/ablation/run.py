"""What is each layer of the planner worth?

    python -m experiments.ablation.run --data DIR [--budgets 2.5 3 3.5] [--model DIR] [--out FILE]

The default policy as it is, and with one layer taken away: online routing, prompt residual, movement, sensitivity. All
at equal peak bytes on the same windows; the paired difference to the full form with a bootstrap interval, at each
budget, over all of them, and for each text. The paper's order (its table of ablations, perplexity): full 7.22, without
routing 7.26, without residual 7.31, without movement 7.43, without sensitivity 7.46. Six minutes on two cores with the
bundled model; runs in --out are not made again.
"""

from collections.abc import Sequence

from experiments.arms import Runs, options
from experiments.paired import Arm, Samples, clear
from experiments.tables import interval, markdown

# In the paper's order, with what it reports: perplexity, 7.22 for the full form.
LAYERS = {"routing": 7.26, "residual": 7.31, "movement": 7.43, "sensitivity": 7.46}
FULL, FULL_PAPER = Arm("default"), 7.22


def summary(samples: Samples, budgets: Sequence[float]) -> dict:
    """Differences to the full form, by layer taken away: ``budgets``, ``all`` of them, and ``texts`` over all."""
    return {
        layer: {
            "budgets": {f"{b:g}": samples.difference(arm, FULL, b) for b in budgets},
            "all": samples.over_budgets(arm, FULL, budgets),
            "texts": {name: samples.over_budgets(arm, FULL, budgets, [name]) for name in samples.names},
            "paper": LAYERS[layer] - FULL_PAPER,
        }
        for layer, arm in ((layer, Arm(f"default:{layer}=off")) for layer in LAYERS)
    }


def shown(found: dict, nats: dict[str, float | None]) -> dict[str, str]:
    """The tables, by name. ``nats`` of the full form by budget."""
    number = lambda v: "-" if v is None else f"{v:.4f}"  # noqa: E731
    first = next(iter(found.values()))
    layers = markdown(
        ["", *(f"budget {b}" for b in nats), "all budgets", "paper, perplexity"],
        [
            ["full, nats a token", *map(number, nats.values()), "", f"{FULL_PAPER}"],
            *(
                [f"without {layer}", *map(interval, row["budgets"].values()), interval(row["all"]),
                 f"{row['paper']:+.2f}"]
                for layer, row in found.items()
            ),
        ],
    )  # fmt: skip
    by_text = markdown(
        ["all budgets", *first["texts"]],
        [[f"without {layer}", *map(interval, row["texts"].values())] for layer, row in found.items()],
    )
    return {"layers": layers, "texts": by_text, "verdict": verdict(found)}


def verdict(found: dict) -> str:
    """Which layers help, over all budgets and texts."""
    lines = []
    for layer, row in found.items():
        whole = row["all"]
        if whole is None or whole["interval_95"] is None:
            said = "not measured"
        elif whole["interval_95"][0] > 0:
            said = "helps"
        else:
            said = "harms" if clear(whole) else "makes no difference that these windows show"
        lines.append([layer, said, interval(whole)])
    return markdown(["layer", "what it does", "nats a token without it"], lines)


def main() -> None:
    parser = options(__doc__, "runs/ablation.json")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.5, 3.0, 3.5])
    args = parser.parse_args()
    runs = Runs(args, {"model": args.model})
    found = summary(runs, args.budgets)
    made = shown(found, {f"{b:g}": runs.mean(FULL, b) for b in args.budgets})
    for table in made.values():
        print(f"\n{table}")
    runs.save(summary=found, tables=made)


if __name__ == "__main__":
    main()

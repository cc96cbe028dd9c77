"""Draw what the planner loses without each of its layers, at every budget.

    python -m experiments.ablation.plot [--results runs/ablation.json]

Nats a token more than the full form on the same windows, 95 % intervals; above zero the layer helps. Needs matplotlib.
"""

import numpy as np

from experiments import drawing


def draw(result: dict):
    """The figure of a run's JSON."""
    found = result["summary"]
    names = list(next(iter(found.values()))["budgets"])
    figure = drawing.figure(7, 4)
    axis = figure.subplots()
    places = np.arange(len(found), dtype=float)
    series = [*((f"budget {b}", [row["budgets"][b] for row in found.values()]) for b in names),
              ("all budgets", [row["all"] for row in found.values()])]  # fmt: skip
    for i, (label, rows) in enumerate(series):
        shift = (i - (len(series) - 1) / 2) * 0.15
        drawing.points(axis, dict(zip(found, rows, strict=True)), places + shift, label, line=False)
    axis.axhline(0, color="black", lw=0.8)
    axis.set_xticks(places, [f"without\n{layer}" for layer in found])
    axis.set_ylabel("nats a token more than the full form")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    args = drawing.arguments(__doc__, "runs/ablation.json")
    drawing.save(draw(drawing.results(args.results)), args.results)


if __name__ == "__main__":
    main()

"""Draw what the planner loses without each of its layers, at every budget.

    python -m experiments.ablation.plot [--results runs/ablation.json]

Nats a token more than the full form on the same windows, 95 % intervals; above zero the layer helps. Needs matplotlib.
"""

from experiments import drawing


def draw(result: dict):
    """The figure of a run's JSON."""
    found = result["summary"].values()
    budgets = list(next(iter(found))["budgets"])
    series = {f"budget {b}": [row["budgets"][b] for row in found] for b in budgets}
    series["all budgets"] = [row["all"] for row in found]
    return drawing.grouped([f"without\n{layer}" for layer in result["summary"]], series, "the full form")


if __name__ == "__main__":
    drawing.main(draw, __doc__, "runs/ablation.json")

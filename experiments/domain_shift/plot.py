"""Draw what calibration on other text costs, and what routing and residual recover of it.

    python -m experiments.domain_shift.plot [--results runs/domain_shift.json]

A group for each shift: nats a token more than a copy that was calibrated on what is served, on the same windows, with
95 % intervals. Needs matplotlib.
"""

import numpy as np

from experiments import drawing


def draw(result: dict):
    """The figure of a run's JSON."""
    found = result["summary"]
    figure = drawing.figure(7, 4)
    axis = figure.subplots()
    places = np.arange(len(found), dtype=float)
    names = list(next(iter(found.values()))["over"])
    for i, name in enumerate(names):
        rows = {shift: row["over"][name] for shift, row in found.items()}
        drawing.points(axis, rows, places + (i - (len(names) - 1) / 2) * 0.15, name, line=False)
    axis.axhline(0, color="black", lw=0.8)
    axis.set_xticks(places, ["on {}\nserves {}".format(*shift.split(" | ")) for shift in found])
    axis.set_ylabel("nats a token more than calibrated on it")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    args = drawing.arguments(__doc__, "runs/domain_shift.json")
    drawing.save(draw(drawing.results(args.results)), args.results)


if __name__ == "__main__":
    main()

"""Draw what calibration on other text costs, and what routing and residual recover of it.

    python -m experiments.domain_shift.plot [--results runs/domain_shift.json]

A group for each shift: nats a token more than a copy that was calibrated on what is served, on the same windows, with
95 % intervals. Needs matplotlib.
"""

from experiments import drawing


def draw(result: dict):
    """The figure of a run's JSON."""
    found = result["summary"]
    ticks = ["on {}\nserves {}".format(*shift.split(" | ")) for shift in found]
    arms = next(iter(found.values()))["over"]
    return drawing.grouped(ticks, {a: [row["over"][a] for row in found.values()] for a in arms}, "calibrated on it")


if __name__ == "__main__":
    drawing.main(draw, __doc__, "runs/domain_shift.json")

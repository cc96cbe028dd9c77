"""Draw quality against bytes: what every policy loses to 16 bits, and what `default` gains on each.

    python -m experiments.quality_memory.plot [--results runs/quality_memory.json]

One row a ladder. Left: nats a token above 16 bits, over the mean bits that all experts have left at the peak. Right:
`default` less every other policy on the same windows, with 95 % intervals; below zero it is better. Needs matplotlib.
"""

from experiments import drawing


def draw(result: dict):
    """The figure of a run's JSON."""
    found = result["summary"]
    ladders, full = found["ladders"], found["full"]["all"]
    figure = drawing.figure(10, 3.8 * len(ladders))
    axes = figure.subplots(len(ladders), 2, squeeze=False)
    for (left, right), (ladder, parts) in zip(axes, ladders.items(), strict=True):
        for name, row in parts["all"]["nats"].items():
            kept = [(float(b), v - full) for b, v in row.items() if v is not None]
            left.plot(*zip(*kept, strict=True), "o-" if name == "default" else ".-", label=name,
                      lw=2 if name == "default" else 1)  # fmt: skip
        left.set(ylabel="nats a token above 16 bits", title=f"widths {ladder}")
        left.set_yscale("symlog", linthresh=1e-3)
        for name, row in parts["all"]["default_over"].items():
            drawing.points(right, list(row.values()), [float(b) for b in row], name)
        right.axhline(0, color="black", lw=0.8)
        right.set(ylabel="default less other, nats a token", title="paired, 95 % intervals")
        right.set_yscale("symlog", linthresh=1e-3)
        for axis in (left, right):
            axis.set_xlabel("budget: bits of all experts at the peak of the cache")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    drawing.main(draw, __doc__, "runs/quality_memory.json")

"""Draw how long users wait in bursts, by policy: every request's time to first token and time per token.

    python -m experiments.throughput.plot [--results experiments/throughput/bursts.json]

The share of requests that waited no longer than so many milliseconds. Needs matplotlib.
"""

import numpy as np

from experiments import drawing


def draw(result: dict):
    """The figure of a run's JSON."""
    figure = drawing.figure(9, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    labels = {"ttft_ms": "ms to the first token", "tpot_ms": "ms a token after the first"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for arm, of in result["arms"].items():
            waited = np.sort([request[key] for request in of["requests"]])
            axis.step(waited, np.arange(1, len(waited) + 1) / len(waited), where="post", label=arm)
        axis.set(xlabel=label, xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    drawing.main(draw, __doc__, "experiments/throughput/bursts.json")

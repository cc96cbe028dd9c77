"""Draw the curves of run.py.

python experiments/lut_groups/plot.py [--results experiments/lut_groups/results.json]
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = json.loads(args.results.read_text())["results"]
    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3.4), sharey=True, layout="constrained")
    for axis, row in zip(axes, results, strict=True):
        for group, curve in row["groups"].items():
            chosen = int(group) == row["auto"]
            x, y = [p["bits_per_weight"] for p in curve.values()], [p["error"] for p in curve.values()]
            axis.plot(x, y, "o-" if chosen else ".-", lw=2.5 if chosen else 0.8, label=f"{group} rows")
        axis.set(title=f"K = {row['cols']}, auto {row['auto']}", xlabel="bits a weight, tables included", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative weighted error")
    axes[-1].legend(title="share a table", fontsize=8)
    figure.savefig(args.results.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()

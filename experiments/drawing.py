"""Figures of the experiments; they need matplotlib (the ``plot`` extra), imported when one is drawn."""

import argparse
import sys
from pathlib import Path

import numpy as np

from experiments import tables


def arguments(doc: str, default: str) -> argparse.Namespace:
    """``--results FILE``; the picture goes beside it."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(default), help="what the run wrote; the PNG goes beside")
    return parser.parse_args()


def figure(width: float, height: float):
    """An empty figure in inches. SystemExit without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit('pictures need matplotlib: pip install "pwjax[plot]"')
    return Figure((width, height), layout="constrained")


def save(drawn, results: Path) -> Path:
    """Write the PNG beside ``results`` and say where."""
    path = results.with_suffix(".png")
    drawn.savefig(path, dpi=110)
    print(path)
    return path


def points(axis, found: dict[str, dict | None], places, label: str, line: bool = True) -> None:
    """Differences with their intervals, those that were measured, against ``places``."""
    kept = [(x, d) for x, d in zip(places, found.values(), strict=True) if d and d["interval_95"]]
    if not kept:
        return
    x, rows = zip(*kept, strict=True)
    y = np.array([d["difference"] for d in rows])
    low, high = np.array([d["interval_95"] for d in rows]).T
    axis.errorbar(x, y, np.abs([y - low, high - y]), fmt="o-" if line else "o", ms=4, lw=1.2, capsize=2, label=label)


def results(path: Path) -> dict:
    """The summary of a run's JSON. SystemExit where the run did not come to its end."""
    found = tables.read(path)
    if "summary" not in found:
        sys.exit(f"the run of {path} was stopped before its end: give its command again")
    return found

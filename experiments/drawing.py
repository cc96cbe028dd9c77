"""Figures of the experiments; they need matplotlib (the ``plot`` extra), imported when one is drawn."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments import tables


def main(draw: Callable[[dict], object], doc: str, default: str) -> None:
    """The command line of a plot script: ``--results FILE``, whose figure by ``draw`` goes beside it as PNG.

    SystemExit where the run did not come to its end.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(default), help="what the run wrote; the PNG goes beside")
    path = parser.parse_args().results
    found = tables.read(path)
    if "summary" not in found:
        sys.exit(f"the run of {path} was stopped before its end: give its command again")
    save(draw(found), path)


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


def points(axis, found: Sequence[dict | None], places, label: str, line: bool = True) -> None:
    """Differences with their intervals, those that were measured, against ``places``."""
    kept = [(x, d) for x, d in zip(places, found, strict=True) if d and d["interval_95"]]
    if not kept:
        return
    x, rows = zip(*kept, strict=True)
    y = np.array([d["difference"] for d in rows])
    low, high = np.array([d["interval_95"] for d in rows]).T
    axis.errorbar(x, y, np.abs([y - low, high - y]), fmt="o-" if line else "o", ms=4, lw=1.2, capsize=2, label=label)


def grouped(ticks: Sequence[str], series: Mapping[str, Sequence[dict | None]], label: str):
    """A figure of differences in nats a token, ``label`` says from what: for each tick a point of every series."""
    drawn = figure(7, 4)
    axis = drawn.subplots()
    places = np.arange(len(ticks), dtype=float)
    for i, (name, found) in enumerate(series.items()):
        points(axis, found, places + (i - (len(series) - 1) / 2) * 0.15, name, line=False)
    axis.axhline(0, color="black", lw=0.8)
    axis.set_xticks(places, ticks)
    axis.set_ylabel(f"nats a token more than {label}")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=8)
    return drawn

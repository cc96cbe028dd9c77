"""A run in retrospect: its epoch log as arrays, as text and as JSON."""

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pwjax.engine.log import read_log
from pwjax.errors import PWJaxError

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 64
SERIES = {"mean_bits": "mean bits", "kv_pages": "KV pages", "free_pages": "free pages", "weights_pages": "weight pages"}


@dataclass(frozen=True, eq=False)
class RunSummary:
    """What :func:`summarize_log` finds.

    ``boundary`` int64[k] and ``series`` (float64[k] each, by the names of :data:`SERIES`): the timeline; a value holds
    until the next one. ``bits`` int64[n] at the end and ``lowest`` int64[n] at any time; ``counts`` of what happened.
    """

    header: dict[str, Any]
    boundary: np.ndarray
    series: dict[str, np.ndarray]
    bits: np.ndarray
    lowest: np.ndarray
    counts: dict[str, int]

    def heat(self, bits: np.ndarray) -> np.ndarray:
        """Mean bits of an expert's two blocks, float64[layers, experts]."""
        return bits.reshape(self.header["layers"], self.header["experts"], 2).mean(axis=2)

    def to_json(self) -> dict[str, Any]:
        """Plain values: counts, the range of every series, the timeline, bits at the end and at their lowest."""
        timeline = {"boundary": self.boundary.tolist(), **{name: row.tolist() for name, row in self.series.items()}}
        ends = {name: {"first": row[0], "least": row.min(), "most": row.max(), "last": row[-1]}
                for name, row in self.series.items() if len(row)}  # fmt: skip
        return {
            "policy": self.header.get("policy"), "counts": self.counts, "ranges": ends, "timeline": timeline,
            "bits": self.bits.tolist(), "lowest_bits": self.lowest.tolist(),
        }  # fmt: skip

    def render(self) -> str:
        """Timeline and heat map as text."""
        counts = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        lines = [f"policy {self.header.get('policy')}: {counts}"]
        if len(self.boundary):
            lines += ["", f"boundaries {self.boundary[0]} to {self.boundary[-1]}"]
        for name, title in SERIES.items():
            row = self.series[name]
            if len(row):
                bars = sparkline(self.boundary, row)
                lines.append(f"{title:<13} {bars}  {row.min():g} to {row.max():g}, at the end {row[-1]:g}")
        lines += ["", *heat_lines("bits at the end", self.heat(self.bits))]
        if (self.lowest != self.bits).any():
            lines += ["", *heat_lines("lowest bits of the run", self.heat(self.lowest))]
        return "\n".join(lines)


def summarize_log(path: str | os.PathLike) -> RunSummary:
    """Read an epoch log. UsageError where it is none, PWJaxError where it is damaged."""
    header, records = read_log(path)
    try:
        bits, shape = np.array(header["bits"]), (header["layers"], header["experts"], 2)
        if not all(type(n) is int and n > 0 for n in shape) or bits.dtype.kind != "i" or bits.shape != (prod(shape),):
            raise ValueError("bits of another number of blocks")
        lowest, rows, counts = bits.copy(), [], Counter()
        for record in records:
            kind = record["kind"]
            counts[kind] += not record.get("withdrawn")  # no plan, only the end of earlier ones
            if kind == "commit":
                for block, before, after, *_ in record["changes"]:
                    if not all(type(n) is int and n >= 0 for n in (block, before, after)):
                        raise ValueError("changes are a block and its bits before and after")
                    bits[block] = after
                    counts["demotions" if after < before else "promotions"] += 1
                lowest = np.minimum(lowest, bits)
            elif kind == "finish" and record["reason"] in ("cancelled", "refused"):
                counts.update({"finish": -1, record["reason"]: 1})
            elif kind == "transfers":
                counts["failed copies"] += len(record["failed"])
            elif kind == "boundary":
                rows.append((record["boundary"], *(float(record[name]) for name in SERIES)))
        table = np.array(rows, float).reshape(-1, 1 + len(SERIES))
        if not np.isfinite(table).all():
            raise ValueError("a boundary has numbers that are not finite")
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise PWJaxError(f"the log {path} is damaged: {type(error).__name__}: {error!s:.200}") from error
    series = {name: table[:, i + 1] for i, name in enumerate(SERIES)}
    told = {
        "finished requests": counts["finish"], "cancelled": counts["cancelled"],
        "refused": counts["refused"] + counts["refuse"], "preemptions": counts["preempt"], "plans": counts["plan"],
        "epochs": counts["commit"], "demotions": counts["demotions"], "promotions": counts["promotions"],
        "failed copies": counts["failed copies"],
    }  # fmt: skip
    return RunSummary(header, table[:, 0].astype(np.int64), series, bits, lowest, told)


def sparkline(at: np.ndarray, values: np.ndarray, columns: int = COLUMNS) -> str:
    """``values`` as bars over equal spans of ``at``, ascending; a span shows its last value."""
    edges = np.linspace(at[0], at[-1], min(columns, len(at)))
    shown = values[np.searchsorted(at, edges, side="right") - 1]
    low, high = values.min(), values.max()
    scaled = (shown - low) / (high - low) if high > low else np.ones_like(shown)
    return "".join(BARS[round(float(x) * (len(BARS) - 1))] for x in scaled)


def heat_lines(title: str, heat: np.ndarray) -> list[str]:
    """A line a layer, a character an expert: its mean bits, rounded; ``#`` above 9."""
    lines = [f"{title} (a row is a layer, a column an expert; # is 16)"]
    for layer, row in enumerate(heat):
        lines.append(f"{layer:>5} " + "".join("#" if bits > 9 else str(round(float(bits))) for bits in row))
    return lines

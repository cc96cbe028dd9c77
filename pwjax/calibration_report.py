"""Calibrating an artifact anew, and the report on it: what its tables say, and whether that is true."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from calib.damage import few_tokens
from calib.report_page import draw, page
from pallas_kernels.pages import MATRICES
from planner import BlockTable
from pwjax.calibration import calibrate
from pwjax.calibration_text import Text
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.manifest import dumps
from pwjax.checkpoints.tables import write_tables

# Blocks that are named one by one.
NAMED = 20


def forms(artifact: Artifact) -> dict[str, BlockTable]:
    """The planner's table for each damage form of the artifact, the default first; operating points left out."""
    facts = artifact.manifest["calibration"]
    names = [name for name in facts["damage"] if "@" not in name]
    default = facts.get("default", names[0])
    return {name: artifact.table(name) for name in sorted(names, key=lambda name: name != default)}


def recalibrate(path: Path, text: Text, **arguments: Any) -> dict:
    """Write new tables into the artifact at ``path``, and return the ``residual`` part of a report.

    Arguments as in :func:`pwjax.calibration.calibrate`, whose work stays until ``calibration.discard``: called again
    with the same ones this takes no time. Heads of the prompt residual are written where they help.
    """
    made = calibrate(path, text, **arguments)
    write_tables(path, made.tables, made.summary)
    return made.residual


def choose_default(artifact: Artifact, form: str) -> Artifact:
    """Make ``form`` the damage table that the planner takes; returns the artifact as it is then."""
    facts = artifact.manifest["calibration"]
    if facts.get("default") != form:
        write_tables(artifact.path, artifact.calibration_tables(), {**facts, "default": form})
    return Artifact.open(artifact.path)


def build(artifact: Artifact, truth: dict | None = None, heads: dict | None = None) -> dict[str, Any]:
    """The report, JSON-ready. ``truth`` from ``evaluate.truth.check_truth``, ``heads`` from :func:`recalibrate`."""
    tables = forms(artifact)
    default, table = next(iter(tables.items()))
    facts, arrays = artifact.manifest["calibration"], artifact.calibration_tables()
    warnings = list(facts.get("warnings", []))
    if truth is not None and truth["best"] != default:
        warnings.append(f"{truth['best']} makes better plans than {default} on the held-out text")
    return {
        "model": artifact.path.name,
        "widths": list(table.widths),
        "blocks": table.blocks,
        "forms": list(tables),
        "default": default,
        "calibration": {key: value for key, value in facts.items() if key not in ("report", "lut_choice")},
        "super_additivity": facts.get("super_additivity"),
        "warnings": warnings,
        "layers": _layers(table),
        "decisive": _decisive(table),
        "few_tokens": few_tokens(arrays["tokens"]) if "tokens" in arrays else [],
        "truth": truth,
        "residual": heads,
    }


def write(report: dict, path: Path) -> list[Path]:
    """Write ``path`` (JSON) and beside it a Markdown page and its pictures; returns the files, the page second.

    Without matplotlib there are no pictures, and the page says so.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dumps(report))
    try:
        pictures = draw(report, path.parent, path.stem)
    except ImportError:
        pictures = {}
        report = report | {"warnings": [*report["warnings"], 'pictures need matplotlib: pip install "pwjax[plot]"']}
    text = path.with_suffix(".md")
    text.write_text(page(report, pictures), "utf-8")
    return [path, text, *(path.parent / name for name in pictures.values())]


def read(path: Path) -> dict:
    """A report that :func:`write` wrote."""
    return json.loads(path.read_text("utf-8"))


def _layers(table: BlockTable) -> list[dict]:
    """Expected damage of all experts of a layer and matrix at one width."""
    total = table.expected.reshape(table.layers, table.experts, 2, -1).sum(1)
    return [
        {
            "layer": layer,
            "matrix": MATRICES[matrix],
            "damage": {str(b): float(total[layer, matrix, j]) for j, b in enumerate(table.widths)},
        }
        for layer in range(table.layers)
        for matrix in (0, 1)
    ]


def _decisive(table: BlockTable) -> dict:
    """The blocks of most damage at the lowest width, and how many of all carry half of it."""
    damage = table.expected[:, 0]
    order, total = np.argsort(-damage, kind="stable"), max(float(damage.sum()), np.finfo(float).tiny)
    floors = np.full(table.blocks, table.widths[0]) if table.floors is None else table.floors
    return {
        "half": int(np.searchsorted(np.cumsum(damage[order]), total / 2)) + 1,
        "blocks": [
            {
                "block": table.name(int(i)),
                "damage": float(damage[i]),
                "share": float(damage[i]) / total,
                "floor": int(floors[i]),
            }
            for i in order[:NAMED]
        ],
    }

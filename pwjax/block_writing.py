"""Writing the blocks of a model, whoever makes them: pages to the layer's file, errors to its record."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from calib.report import LayerErrors
from pwjax.checkpoints.writer import ArtifactWriter
from pwjax.progress import Progress


class MadeBlock(NamedTuple):
    """``pages`` uint32[n, page_words] of a block of ``matrix``; ``damage`` float64, a number a column of the table that
    is made of the records; ``error`` float64[B] and ``energy`` for the report; whether its tables are ``refined``."""

    matrix: int
    pages: np.ndarray
    damage: np.ndarray
    error: np.ndarray
    energy: float
    refined: bool = False


def write_layers(
    writer: ArtifactWriter, blocks: Callable[[int], Iterable[MadeBlock]], stage: str, progress: Progress
) -> list[dict]:
    """Write every layer that an earlier run did not finish and return the records of all.

    ``blocks(layer)`` gives those of a layer in file order. A record is ``{"damage": a row a block, "refined": how many,
    "report": rows}``.
    """
    config, done = writer.config, writer.records()
    count = len(done) * 2 * config.num_experts
    for layer in range(config.num_layers):
        if layer in done:
            continue
        errors = LayerErrors(writer.geometry.widths)
        with writer.layer(layer) as file:
            file.record = {"damage": [], "refined": 0}
            for made in blocks(layer):
                file.add(made.pages)
                file.record["damage"].append(made.damage.tolist())
                file.record["refined"] += made.refined
                errors.add(made.matrix, made.error, made.energy)
                count += 1
                progress(stage, count, config.blocks)
            file.record["report"] = errors.rows(layer)
    return [record for _, record in sorted(writer.records().items())]

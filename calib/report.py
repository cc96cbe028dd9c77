"""What quantization lost: relative weighted error of every layer and matrix at every width."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pallas_kernels.pages import MATRICES


class LayerErrors:
    """Sums over the experts of one layer: ``sum h (W-W_b)^2`` at each of ``widths``, and ``sum h W^2``."""

    def __init__(self, widths: Sequence[int]):
        self._widths = widths
        self._error, self._energy = np.zeros((len(MATRICES), len(widths))), np.zeros(len(MATRICES))

    def add(self, matrix: int, error: np.ndarray, energy: float) -> None:
        """One block: ``error`` float64[B]."""
        self._error[matrix] += error
        self._energy[matrix] += energy

    def rows(self, layer: int) -> list[dict[str, object]]:
        """JSON-ready, a row a matrix: ``{"layer", "matrix", "relative_error": {"2": ..., ...}}``."""
        return [
            {
                "layer": layer,
                "matrix": name,
                "relative_error": {
                    str(b): float(e / energy) if energy > 0 else 0.0 for b, e in zip(self._widths, error, strict=True)
                },
            }
            for name, error, energy in zip(MATRICES, self._error, self._energy, strict=True)
        ]


def table(rows: Iterable[Mapping]) -> str:
    """The rows as a text table, widths as columns; empty string without rows."""
    rows = list(rows)
    if not rows:
        return ""
    widths = list(rows[0]["relative_error"])
    head = f"{'layer':>5}  {'matrix':<8}" + "".join(f"{b + ' bits':>12}" for b in widths)
    lines = [
        f"{row['layer']:>5}  {row['matrix']:<8}" + "".join(f"{row['relative_error'][b]:>12.3e}" for b in widths)
        for row in rows
    ]
    return "\n".join(["relative weighted error of the experts", head, *lines])

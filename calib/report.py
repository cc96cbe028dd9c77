"""What quantization lost: relative weighted error of every layer and matrix at every width."""

from collections.abc import Iterable, Mapping


def layer_rows(
    layer: int, error: Mapping[str, Mapping[int, float]], energy: Mapping[str, float]
) -> list[dict[str, object]]:
    """Rows of one layer: ``error[matrix][bits]`` and ``energy[matrix]`` are sums over its experts.

    A row is ``{"layer", "matrix", "relative_error": {"2": ..., ...}}`` with ``sum h (W-W_b)^2 / sum h W^2``.
    """
    return [
        {
            "layer": layer,
            "matrix": matrix,
            "relative_error": {str(b): (e / energy[matrix] if energy[matrix] > 0 else 0.0) for b, e in errors.items()},
        }
        for matrix, errors in error.items()
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

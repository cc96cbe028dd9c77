"""How many rows should share a table? The LUT groups with the least error at equal bytes, and the page that suits them.

Sharing costs error at every width and saves table bytes at every width; which wins depends on how long the rows are.
So candidates are compared as rate-distortion curves, (pages, error) over the widths, never width by width.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from calib.anyprecision import quantize_block, weighted_energy, weighted_errors
from pallas_kernels.pages import BlockShape, Geometry, choose_page_words

# Rows of a sampled block that are looked at.
SAMPLE_ROWS = 256
MAX_LUT_ROWS = 64


def lut_candidates(rows: int) -> tuple[int, ...]:
    """Powers of two up to 64 that divide ``rows``."""
    return tuple(1 << i for i in range(MAX_LUT_ROWS.bit_length()) if rows % (1 << i) == 0)


@dataclass(frozen=True)
class LutChoice:
    """What :func:`choose_lut_rows` settled on; ``errors`` are relative errors {matrix: {lut_rows: {bits: error}}}."""

    lut_rows: tuple[int, int]
    page_words: int
    errors: dict[int, dict[int, dict[int, float]]]


def choose_lut_rows(
    samples: tuple[Iterable[tuple[np.ndarray, np.ndarray | None]], ...],
    shapes: tuple[tuple[int, int], tuple[int, int]],
    widths: tuple[int, ...],
    fallback: bool,
    kv_row_words: int,
    candidates: tuple[tuple[int, ...], ...] | None = None,
    page_words: int | None = None,
) -> LutChoice:
    """The LUT group of each matrix with the least weighted error at equal bytes, and the page size that suits it.

    ``samples[m]`` are ``(weight, importance)`` pairs of matrix m, ``shapes[m]`` its (rows, cols). Bytes are counted in
    whole pages, and the page size follows the groups, so the choice is repeated until neither moves. Groups whose
    scales overflow are no candidates. ``candidates`` fixes the groups, ``page_words`` the page.
    """
    groups_of = candidates or tuple(lut_candidates(rows) for rows, _ in shapes)
    errors = {m: _sample_errors(samples[m], widths, groups_of[m]) for m in (0, 1)}
    blocks = lambda groups: [BlockShape(*shapes[m], groups[m]) for m in (0, 1)]  # noqa: E731
    chosen = tuple(min(errors[m], key=lambda g: abs(g - 4)) for m in (0, 1))
    seen: list[tuple[int, ...]] = []
    while True:
        words = page_words or choose_page_words(*blocks(chosen), widths, fallback, kv_row_words)
        if chosen in seen:
            return LutChoice((chosen[0], chosen[1]), words, errors)
        seen.append(chosen)
        chosen = tuple(
            best_curve(
                {
                    group: [
                        (Geometry(words, widths, fallback, *blocks(_with(chosen, m, group))).block_pages(m, b), error)
                        for b, error in by_bits.items()
                    ]
                    for group, by_bits in errors[m].items()
                }
            )
            for m in (0, 1)
        )


def _with(pair: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``pair`` with one entry replaced."""
    return tuple(value if i == index else old for i, old in enumerate(pair))


def best_curve(curves: dict[int, list[tuple[int, float]]]) -> int:
    """Key of the (pages, error) curve that lies lowest: mean log error over the pages that two curves share.

    Challengers are tried in order and must win, so the first of equals stays.
    """
    best, *challengers = curves
    for key in challengers:
        if _log_gap(curves[key], curves[best]) < 0:
            best = key
    return best


def _log_gap(left: list[tuple[int, float]], right: list[tuple[int, float]]) -> float:
    """Mean of log error of ``left`` minus ``right`` at equal pages; negative where left is better."""
    logs = [(np.array([p for p, _ in c], float), np.log([max(e, 1e-30) for _, e in c])) for c in (left, right)]
    low, high = max(p[0] for p, _ in logs), min(p[-1] for p, _ in logs)
    # Curves that do not overlap are compared where the dearer one begins: the cheaper one stays at its best.
    grid = np.linspace(low, max(low, high), 65)
    return float(np.mean(np.interp(grid, *logs[0]) - np.interp(grid, *logs[1])))


def _sample_errors(samples, widths, candidates) -> dict[int, dict[int, float]]:
    """Relative weighted error of every candidate group at every width, over the samples' first rows."""
    pairs = [(np.asarray(w, np.float32), h) for w, h in samples]
    errors = {}
    for group in candidates:
        total, energy = np.zeros(len(widths)), 0.0
        try:
            for weight, importance in pairs:
                rows = min(len(weight), max(SAMPLE_ROWS // group, 1) * group)
                if importance is not None:
                    importance = np.broadcast_to(importance, weight.shape)[:rows]
                weight = weight[:rows]
                block = quantize_block(weight, importance, widths, group)
                energy += weighted_energy(weight, importance)
                total += weighted_errors(weight, (importance,), block, widths)[0]
        except ValueError:
            if group == candidates[-1] and not errors:
                raise
            continue
        errors[group] = {b: float(t) / energy if energy > 0 else 0.0 for b, t in zip(widths, total, strict=True)}
    return errors

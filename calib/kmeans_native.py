"""The functions of :mod:`calib.kmeans_loops` in C++: the same results to the bit, and other threads run meanwhile.

C++ trusts sizes, places and borders; they are checked here.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np

from pallas_kernels import native

_INTS = np.ctypeslib.ndpointer(np.int64, flags="C")
_FLOATS = np.ctypeslib.ndpointer(np.float64, flags="C")
_SIZE = ctypes.c_int64
_ARGUMENTS = {
    "pwjax_prefix": [_FLOATS, *[_SIZE] * 2, _FLOATS],
    "pwjax_search": [*[_FLOATS] * 2, *[_SIZE] * 3, _INTS],
    "pwjax_best_path": [*[_FLOATS] * 2, _INTS, *[_SIZE] * 4, ctypes.c_bool, _FLOATS, *[_INTS] * 2],
    "pwjax_lloyd": [*[_FLOATS] * 3, *[_SIZE] * 4, _FLOATS, _INTS],
    "pwjax_best_cuts": [*[_FLOATS] * 3, _INTS, *[_FLOATS] * 2, *[_SIZE] * 3, _INTS],
}


@cache
def library() -> ctypes.CDLL | None:
    """The library with these functions declared; None where it is not built, or was built before there were any."""
    found, _ = native.load()
    if found is None or not all(hasattr(found, name) for name in _ARGUMENTS):
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def prefix(values: np.ndarray) -> np.ndarray:
    """As :func:`calib.kmeans_loops.prefix`."""
    rows, cols = values.shape
    sums = np.empty((rows, cols + 1))
    _run("pwjax_prefix", _floats(values, rows, cols), rows, cols, sums)
    return sums


def search(sorted_rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """As :func:`calib.kmeans_loops.search`."""
    (rows, cols), count = sorted_rows.shape, targets.shape[1]
    places = np.empty((rows, count), np.int64)
    _run("pwjax_search", _floats(sorted_rows, rows, cols), _floats(targets, rows, count), rows, cols, count, places)
    return places


def best_path(sums: Sequence[np.ndarray], places: np.ndarray) -> np.ndarray:
    """As :func:`calib.kmeans_loops.best_path`."""
    (rows, inner, count), cols = places.shape, sums[0].shape[1] - 1
    mass, moment = (_floats(table, rows, cols + 1) for table in sums)
    shared = places.strides[1] == 0
    candidates = _within(places[:, 0] if shared else places, cols)
    scratch, choices = np.empty((count + 6, count)), np.empty((inner, count), np.int64)
    borders = np.empty((rows, inner + 2), np.int64)
    _run("pwjax_best_path", mass, moment, candidates, rows, cols, inner, count, shared, scratch, choices, borders)
    return borders


def lloyd(x: np.ndarray, sums: Sequence[np.ndarray], borders: np.ndarray, steps: int) -> np.ndarray:
    """As :func:`calib.kmeans_loops.lloyd`."""
    (rows, cols), clusters = x.shape, borders.shape[1] - 1
    mass, moment = (_floats(table, rows, cols + 1) for table in sums)
    moved = _within(borders, cols).copy()
    _run("pwjax_lloyd", _floats(x, rows, cols), mass, moment, rows, cols, clusters, steps, np.empty(clusters), moved)
    return moved


def best_cuts(
    x: np.ndarray, w: np.ndarray, mass: np.ndarray, borders: np.ndarray, centroids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """As :func:`calib.kmeans_loops.best_cuts`."""
    (rows, cols), clusters = x.shape, borders.shape[1] - 1
    x, w, mass = _floats(x, rows, cols), _floats(w, rows, cols), _floats(mass, rows, cols + 1)
    centroids, weights = _floats(centroids, rows, clusters), _floats(weights, rows, clusters)
    cuts = np.empty((rows, clusters), np.int64)
    _run("pwjax_best_cuts", x, w, mass, _within(borders, cols), centroids, weights, rows, cols, clusters, cuts)
    return cuts


def _run(name: str, *arguments) -> None:
    built = library()
    assert built is not None, "calib.kmeans_loops asks for the library first"
    getattr(built, name)(*arguments)


def _floats(table: np.ndarray, rows: int, cols: int) -> np.ndarray:
    if table.shape != (rows, cols) or not cols:
        raise ValueError(f"expected a table of {rows} x {cols}, at least one column, got {table.shape}")
    return np.ascontiguousarray(table, np.float64)


def _within(places: np.ndarray, cols: int) -> np.ndarray:
    if places.min(initial=0) < 0 or places.max(initial=0) > cols:
        raise ValueError(f"places from {places.min()} to {places.max()} among {cols} values")
    return np.ascontiguousarray(places, np.int64)

"""Rows of activations in a file: pread and pwrite, so that what is spilled is never this process's memory."""

import os
from pathlib import Path

import numpy as np


class Spill:
    """``rows`` rows float32[width] at ``path``.

    A new file is written beside its place and appears with :meth:`commit`; one that is there is opened for reading.
    """

    def __init__(self, path: Path, rows: int, width: int):
        self.path, self.rows, self.width = path, rows, width
        self._row_bytes = 4 * width
        self._temporary = None if path.exists() else path.with_name(path.name + ".tmp")
        flags = os.O_RDONLY if self._temporary is None else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._file = os.open(self._temporary or path, flags, 0o644)

    def write(self, first: int, rows: np.ndarray) -> None:
        """Put ``rows`` [n, width] at row ``first``."""
        data, offset = memoryview(np.ascontiguousarray(rows, np.float32)).cast("B"), first * self._row_bytes
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows float32[count, width] from row ``first``; OSError where the file is shorter."""
        out = np.empty((count, self.width), np.float32)
        data, offset = memoryview(out).cast("B"), first * self._row_bytes
        while data:
            got = os.preadv(self._file, [data], offset)
            if not got:
                raise OSError(f"{self.path} ends before row {first + count}")
            data, offset = data[got:], offset + got
        return out

    def take(self, index: np.ndarray) -> np.ndarray:
        """Rows float32[n, width] at ``index`` int[n]; runs of neighbours are read at once."""
        index = np.asarray(index)
        if not index.size:
            return np.empty((0, self.width), np.float32)
        runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1)
        return np.concatenate([self.read(int(run[0]), len(run)) for run in runs])

    def commit(self) -> None:
        """Give a file that was written its name; it stays open."""
        if self._temporary is not None:
            os.replace(self._temporary, self.path)
            self._temporary = None

    def close(self, remove: bool = False) -> None:
        """Close the file; ``remove`` deletes it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if remove:
            (self._temporary or self.path).unlink(missing_ok=True)

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

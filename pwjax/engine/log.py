"""The epoch log: JSON lines, a header first, then one line for every boundary at which something happened."""

import json
import os
from contextlib import suppress
from typing import Any, TextIO

from pwjax.errors import PWJaxError, UsageError

LOG_SCHEMA = 1


class EpochLog:
    """Appends to ``path`` (None: keeps nothing); line by line, so that a killed run leaves a readable log.

    UsageError where the file cannot be opened, PWJaxError where a record cannot be written.
    """

    def __init__(self, path: str | os.PathLike | None, header: dict[str, Any]):
        self._file: TextIO | None = None
        self._path = path
        if path is None:
            return
        try:
            self._file = open(path, "w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UsageError(f"cannot write the log {path}: {error.strerror}") from error
        self.write({"kind": "header", "schema": LOG_SCHEMA, **header})

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        if not self._file:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._drop()
            raise PWJaxError(f"cannot write the log {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        if self._file:
            self._file.close()
            self._file = None

    def _drop(self) -> None:
        """Close a file that takes no more; what it buffers cannot be saved."""
        with suppress(OSError):
            self.close()
        self._file = None

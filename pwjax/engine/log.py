"""The epoch log: JSON lines, a header first, then every decision of the engine. ``docs/log.md`` has the schema.

A run is a function of the header, of the inputs (requests, cancellations, plans asked for by hand) and of what a clock
or a policy decides: which plan was made, which copies had landed at a boundary, and which cached prefixes were dropped
for their price. The log holds all of them, so :mod:`pwjax.engine.replay` can repeat it. No record but ``evict`` holds
anything that was timed.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from pwjax.errors import PWJaxError, UsageError

LOG_SCHEMA = 3
# Records of what came from outside; a replay hands them to the engine again.
INPUTS = ("submit", "cancel", "apply", "freeze", "settle")


class LogSink(Protocol):
    """Takes the records of an engine, in order."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one record (JSON values only)."""
        ...

    def close(self) -> None:
        """No more records come; harmless when done twice."""
        ...


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
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
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


def read_log(path: str | os.PathLike) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Header and records of a log; a last line that a killed run left unfinished is left out.

    UsageError where the file cannot be read or is not an epoch log of this schema, PWJaxError (from the iterator)
    for a line in the middle that is no record.
    """
    path = Path(path)
    try:
        file = open(path, encoding="utf-8", errors="replace")
        first = file.readline()
    except OSError as error:
        raise UsageError(f"cannot read the log {path}: {error.strerror}") from error
    try:
        header = json.loads(first)
        if not isinstance(header, dict) or header.get("kind") != "header":
            raise ValueError("no header")
    except (ValueError, RecursionError) as error:
        file.close()
        raise UsageError(f"{path} is not an epoch log: its first line is no header") from error
    if header.get("schema") != LOG_SCHEMA:
        file.close()
        raise UsageError(f"{path} has log schema {header.get('schema')!r}; this version reads {LOG_SCHEMA}")
    return header, _records(path, file)


def _records(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    last = 0
    with file:
        for number, line in enumerate(file, 2):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                    raise ValueError("no record")
                if type(record.get("boundary")) is not int or record["boundary"] < last:
                    raise ValueError("records are in the order of their boundaries")
                last = record["boundary"]
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):
                    return
                raise PWJaxError(f"line {number} of the log {path} is not a record; the file is damaged") from error
            yield record

"""The results file of a job: one JSON object a line, appended as requests finish, resumed after any kind of end.

    out.jsonl             the results; every record is flushed and synced before the next request's is written
    out.jsonl.meta.json   the settings that the results depend on, written before the first of them

A kill can only tear the last line: it has no newline yet, or is no JSON, and is cut off when the job comes back.
Results under other settings are never mixed: the sidecar names what differs, and the job is refused.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers are then the user's own affair
    fcntl = None

from pwjax.engine.requests import Request
from pwjax.errors import PWJaxError, UsageError

META_SUFFIX = ".meta.json"
META_SCHEMA = 1


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Hex sha256 of settings that JSON can hold, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ResultWriter:
    """Appends results to ``path``; ``finished`` are the ids (as text) that were there before.

    ``refused`` maps those of them that were refused to the reason. ``settings`` is what the results depend on (model,
    precision, sampling defaults, …), as JSON can hold it. Raises UsageError where the file belongs to other settings,
    to no run of ours, or to a run that is still going. A context manager; not for several threads.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path = Path(path)
        self.meta_path = self.path.with_name(self.path.name + META_SUFFIX)
        # Through JSON, so that a tuple compares equal to the list it comes back as.
        self.settings = json.loads(json.dumps(settings))
        self.finished: set[str] = set()
        # Of the results that were there: errors of those refused.
        self.refused: dict[str, str] = {}
        # What tells, by id, whether a request is still the one that its result is of.
        self._marks: dict[str, str] = {}
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"the output {self.path} is a directory or device; name a file, or leave --output out")
        try:
            # Not "a": on some systems an appending descriptor cannot be cut back to the last good record.
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise UsageError(f"cannot write the output {self.path}: {error.strerror}") from error
        try:
            # The lock first: a run that was just ending may still have made the file somebody's.
            self._lock()
            if not self._check_owner():
                # Before the first result, so that there is never a result whose settings are unknown.
                self._write_meta()
            self._end = self._recover()
        except BaseException:
            os.close(self._file)
            raise

    def left(self, requests: Sequence[Request]) -> list[Request]:
        """The requests that have no result yet, in order; UsageError where the file holds one that was asked otherwise.

        Results that are written from then on keep what they were asked, as ``request``.
        """
        for request in requests:
            mark = _mark(request)
            if self._marks.setdefault(request.key, mark) != mark:
                raise UsageError(
                    f"{self.path} has a result {request.key!r} for another prompt, or for one with other settings; "
                    "restore the prompts file to resume, or choose another --output. Lines without an id are known by "
                    "their number"
                )
        return [request for request in requests if request.key not in self.finished]

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one result (it must have an ``id``) and sync it to disk.

        Numbers that JSON cannot hold become null. On an error of the disk (full, quota) the file keeps whole records
        only and a PWJaxError says how to go on.
        """
        key = str(record["id"])
        if key in self.finished:
            raise ValueError(f"the result {key!r} is already in {self.path}")
        asked = {"request": self._marks[key]} if key in self._marks else {}
        data = (json.dumps(_finite({**record, **asked}), ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            os.lseek(self._file, self._end, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise _disk_error(self.path, error, len(self.finished)) from error
        self._end += len(data)
        self.finished.add(key)

    def close(self) -> None:
        """Release the file; harmless when done twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> bool:
        """Whether the file has results of these settings; raises if what is there is somebody else's."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return False
        hint = "choose another --output, or remove the file"
        try:
            meta = json.loads(self.meta_path.read_bytes())
            saved, digest = meta["settings"], meta["sha256"]
        except FileNotFoundError:
            raise UsageError(f"{self.path} exists and has no {self.meta_path.name} beside it; {hint}") from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(f"{self.meta_path} cannot be read, so {self.path} cannot be resumed; {hint}") from error
        if digest != settings_hash(self.settings) or digest != settings_hash(saved):
            changed = _differences(saved, self.settings) or ["the stored settings were edited"]
            raise UsageError(
                f"{self.path} was written with other settings: {'; '.join(changed)}. Repeat the old ones to resume, "
                "or choose another --output"
            )
        return True

    def _write_meta(self) -> None:
        meta = {"schema": META_SCHEMA, "sha256": settings_hash(self.settings), "settings": self.settings}
        temporary = self.meta_path.with_name(self.meta_path.name + ".tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(meta, file, indent=1, sort_keys=True)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.meta_path)
            _sync_directory(self.meta_path.parent)
        except OSError as error:
            raise _disk_error(self.meta_path, error, 0) from error

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another run is writing {self.path}; wait for it, or choose another --output") from None
        except OSError:
            pass  # a file system without locks

    def _recover(self) -> int:
        """Collect the finished ids and cut a torn last line off; returns the length in bytes that is kept."""
        with open(self.path, "rb") as file:
            lines = file.read().split(b"\n")
        end = 0
        # What follows the last newline is torn, or is empty.
        complete = lines[:-1]
        for index, line in enumerate(complete):
            try:
                self._remember(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if index + 1 < len(complete):
                    raise UsageError(
                        f"{self.path}, line {index + 1} is not a result; repair or remove the line to resume"
                    ) from error
                break  # a block that reached the disk after its length did
            end += len(line) + 1
        os.ftruncate(self._file, end)
        return end

    def _remember(self, record: Mapping[str, Any]) -> None:
        key = str(record["id"])
        self.finished.add(key)
        if record.get("finish_reason") == "refused":
            self.refused[key] = str(record.get("error"))
        if "request" in record:
            self._marks[key] = str(record["request"])


def _mark(request: Request) -> str:
    """Sixteen hex digits of all that a request asks for."""
    return settings_hash({name: value for name, value in asdict(request).items() if name != "id"})[:16]


def _differences(saved: Any, now: Any, prefix: str = "") -> list[str]:
    """``name was X, now Y`` for every leaf that differs."""
    if not (isinstance(saved, dict) and isinstance(now, dict)):
        return [f"{prefix} was {json.dumps(saved)}, now {json.dumps(now)}"] if saved != now else []
    found = []
    for key in sorted(set(saved) | set(now)):
        found += _differences(saved.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _disk_error(path: Path, error: OSError, kept: int) -> PWJaxError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "the disk is full" if full else (error.strerror or str(error))
    fix = "free some space" if full else "correct that"
    return PWJaxError(
        f"cannot write {path}: {what}. {kept} result{'s' * (kept != 1)} kept; {fix} and run the same command to go on"
    )


def _sync_directory(path: Path) -> None:
    """Make a rename durable, where the system lets a directory be synced."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)

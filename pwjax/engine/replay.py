"""Repeats a logged run: the same engine, given inputs, plans and outcomes of the log in place of clock and policy.

The engine of a replay writes a log too, into :class:`LogCheck`, which compares every record with the one that was
logged: admissions, limits, preemptions, commits, and the token ids of every request that ended. The first difference
ends the replay.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from planner import BlockTable
from pwjax.engine.decisions import Asked, Recorded
from pwjax.engine.engine import Engine
from pwjax.engine.log import INPUTS, LOG_SCHEMA, read_log
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.errors import PWJaxError, UsageError

# Parts of the header that say where things were, not what they were.
HINTS = ("kind", "schema", "model_path")


class HeaderMismatch(PWJaxError):
    """The run that is being replayed had another model, machine, version or setting; the message lists what differs."""


class ReplayDifference(PWJaxError):
    """The replay did something else than the log says; the message names the first record and field that differ."""


class _Exhausted(Exception):
    """The log of a run that was killed ends here."""


@dataclass(frozen=True)
class Replay:
    """What was repeated and found equal. ``complete``: the log has an end, so the run was not killed."""

    requests: int
    tokens: int
    commits: int
    boundaries: int
    complete: bool


class LogCheck:
    """A log sink that compares: every record must equal the next one of ``records``.

    ReplayDifference at the first that does not; after that it takes anything, so that the engine can close.
    """

    def __init__(self, header: dict[str, Any], records: Sequence[dict[str, Any]]):
        self._header = header
        # What was refused at the door left no trace in the engine, so a replay does not submit it.
        self._records = [r for r in records if r["kind"] != "refuse"]
        self.ended = bool(self._records) and self._records[-1]["kind"] == "end"
        self._next = 0
        self._open = True

    def begin(self, header: dict[str, Any]) -> "LogCheck":
        """Compare the header of the engine that is being made; HeaderMismatch lists every part that differs."""
        here = json.loads(json.dumps({"kind": "header", "schema": LOG_SCHEMA, **header}))
        names = [n for n in {**self._header, **here} if n not in HINTS and self._header.get(n) != here.get(n)]
        if names:
            lines = [f"  {name}: {_difference(self._header.get(name), here.get(name))}" for name in names]
            raise HeaderMismatch(
                "this is not the machine, version or setting of the logged run, so its tokens cannot be repeated "
                "exactly; it differs in\n" + "\n".join(lines)
            )
        return self

    def write(self, record: dict[str, Any]) -> None:
        """Compare with the next logged record."""
        if not self._open or record["kind"] == "refuse":
            return
        if self._next == len(self._records):
            self._open = False
            if self.ended:
                raise ReplayDifference(f"the log has ended, but the replay goes on with {record['kind']!r}")
            raise _Exhausted
        logged, here = self._records[self._next], json.loads(json.dumps(record))
        if logged != here:
            self._open = False
            raise ReplayDifference(
                f"record {self._next + 1} (boundary {logged.get('boundary')}, {logged['kind']}) is not repeated: "
                + _difference(logged, here)
            )
        self._next += 1

    @property
    def compared(self) -> list[dict[str, Any]]:
        """Records that were repeated."""
        return self._records[: self._next]

    @property
    def left(self) -> list[dict[str, Any]]:
        """Records that were not repeated yet."""
        return self._records[self._next :]

    def close(self) -> None:
        """Stop comparing."""
        self._open = False


def replay(path: str | os.PathLike, model: str | os.PathLike | None = None, **load_options: Any) -> Replay:
    """Repeat the run of the log at ``path`` and compare every record, token ids included.

    ``model``: the artifact, default the one the log names. ``load_options`` go to :func:`pwjax.load` (``report``,
    ``progress``). UsageError for what is no log or a damaged one, HeaderMismatch, ReplayDifference, and what ``load``
    raises. What is counted was compared.
    """
    from pwjax.loading import Injected, load

    header, stream = read_log(path)
    if not isinstance(header.get("settings"), dict):
        raise UsageError(f"{path} cannot be repeated: its header lacks the settings of the run, so the file is damaged")
    records = list(stream)
    check = LogCheck(header, records)
    model = header.get("model_path") if model is None else model
    with _reading(path):
        inputs, last = _inputs(records), _last_boundary(records)
        injected = Injected(log=check.begin, decisions=Recorded(records))
        engine = load(model, **header["settings"], **load_options, injected=injected)
    with engine:
        try:
            with _reading(path):
                _check_blocks(records, engine.parts.table)
                _run(engine, inputs, last)
        except BaseException:
            check.close()  # what closing the engine says is not what went wrong
            raise
        if not check.ended:
            check.close()  # the run was killed; what closing the engine says has no counterpart
    if check.left:
        first = check.left[0]
        raise ReplayDifference(
            f"the replay has ended, but the log goes on with {len(check.left)} records, the first of boundary "
            f"{_short(first.get('boundary'))}, {first['kind']!r}"
        )
    finished = [r for r in check.compared if r["kind"] == "finish"]
    return Replay(
        requests=len(finished),
        tokens=sum(len(r["token_ids"]) for r in finished),
        commits=sum(r["kind"] == "commit" for r in check.compared),
        boundaries=last,
        complete=check.ended,
    )


def run_records(engine: Engine, records: Sequence[dict[str, Any]]) -> None:
    """Drive an engine through the inputs of ``records``, each at its boundary, up to the last boundary."""
    _run(engine, _inputs(records), _last_boundary(records))


@contextmanager
def _reading(path: str | os.PathLike) -> Iterator[None]:
    """What does not have the fields of its kind, or makes no sense, was not written by an engine: UsageError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"the log {path} is damaged: {type(error).__name__}: {error!s:.200}") from error


def _last_boundary(records: Sequence[dict[str, Any]]) -> int:
    """Boundary of the last record that a replay repeats."""
    return next((r["boundary"] for r in reversed(records) if r["kind"] != "refuse"), 0)


def _check_blocks(records: Sequence[dict[str, Any]], table: BlockTable) -> None:
    """ValueError for a block or a width that the model does not have: negative ones would count from the end."""
    for record in records:
        changes = record["changes"] if record["kind"] in ("plan", "apply", "commit") else ()
        blocks = [block for block, *_ in changes]
        if record["kind"] == "transfers":
            blocks += [*record["landed"], *record["started"], *(block for block, _ in record["failed"])]
        widths = [bits for _, *pair in changes for bits in pair[:2]]
        if not all(type(b) is int and 0 <= b < table.blocks for b in blocks) or not set(widths) <= set(table.widths):
            raise ValueError(f"a block or a width that the model does not have: {_short(record)}")


def _run(engine: Engine, inputs: Sequence[tuple[int, Callable[[Engine], object]]], last: int) -> None:
    try:
        for boundary, give in inputs:
            _step_to(engine, boundary)
            give(engine)
        _step_to(engine, last)
    except _Exhausted:
        pass


def _step_to(engine: Engine, boundary: int) -> None:
    while engine.boundaries.index < boundary:
        engine.step()


def _inputs(records: Sequence[dict[str, Any]]) -> list[tuple[int, Callable[[Engine], object]]]:
    """The boundary of each input, and what gives it to an engine."""
    return [(record["boundary"], _input(record)) for record in records if record["kind"] in INPUTS]


def _input(record: dict[str, Any]) -> Callable[[Engine], object]:
    kind = record["kind"]
    if kind == "submit":
        sampling = SamplingParams(**record["sampling"])
        demand = {name: record[name] for name in ("min_bits", "max_damage", "score") if name in record}
        request = Request(record["id"], None, tuple(record["prompt_token_ids"]), sampling, **demand)
        return lambda engine: engine.submit(request)
    if kind == "cancel":
        ids = record["ids"]
        return lambda engine: engine.cancel(ids)
    if kind == "apply":
        asked = Asked.of_record(record)
        return lambda engine: engine.boundaries.ask("apply", asked)
    return Engine.freeze if kind == "freeze" else Engine.settle


def _difference(logged: Any, here: Any) -> str:
    """``logged -> here`` of the innermost part that differs, both cut to a readable length."""
    where = ""
    while isinstance(logged, dict) and isinstance(here, dict):
        names = [n for n in {**logged, **here} if logged.get(n) != here.get(n)]
        if len(names) != 1 and not where:
            return ", ".join(f"{n} {_short(logged.get(n))} -> {_short(here.get(n))}" for n in names[:4])
        name = names[0]
        where, logged, here = f"{where}{name} ", logged.get(name), here.get(name)
    if isinstance(logged, list) and isinstance(here, list):
        shared = min(len(logged), len(here))
        at = next((i for i in range(shared) if logged[i] != here[i]), shared)
        return f"{where}[{at}] {_short(logged[at : at + 1])} -> {_short(here[at : at + 1])}"
    return f"{where}{_short(logged)} -> {_short(here)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."

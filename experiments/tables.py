"""What results have in common: how a JSON file is written, and how its numbers become Markdown."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pwjax import environment

SCHEMA = "pwjax-experiment-1"


def command() -> str:
    """The command that runs now; of absolute paths only the last name, since they mean nothing elsewhere."""
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name}" if spec else os.path.relpath(sys.argv[0])
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    return f"python {program} {shlex.join(arguments)}".strip()


def write(path: Path, **result: object) -> None:
    """Write ``result`` at once, with format version, command, machine and versions; rows of numbers are one line."""
    about = {"schema": SCHEMA, "command": command(), "cpu": environment.cpu_info(), "versions": environment.versions()}
    text = json.dumps(about | result, indent=1)
    text = re.sub(r"\[[^][{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def read(path: Path) -> dict:
    """What :func:`write` wrote; SystemExit for anything else."""
    if not path.exists():
        sys.exit(f"there are no results at {path}: run the experiment first, or give --results FILE")
    result = json.loads(path.read_text())
    if result.get("schema") != SCHEMA:
        sys.exit(f"{path} has the format {result.get('schema')}, not {SCHEMA}; give another file, or make it again")
    return result


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def interval(found: dict | None, digits: int = 4) -> str:
    """``+0.0123 [+0.0100, +0.0140]``, ``-`` for what was not measured."""
    if found is None:
        return "-"
    limits = found["interval_95"]
    shown = f" [{limits[0]:+.{digits}f}, {limits[1]:+.{digits}f}]" if limits else ""
    return f"{found['difference']:+.{digits}f}{shown}"


def percent(found: dict | None) -> str:
    """``68.5% [60.0%, 75.0%]`` of the share of a gap, ``-`` for what was not measured."""
    if found is None:
        return "-"
    if not found["gap"]["interval_95"] or found["gap"]["interval_95"][1] >= 0:
        return "no clear gap"
    limits = found["interval_95"]
    return f"{found['share']:.1%}" + (f" [{limits[0]:.1%}, {limits[1]:.1%}]" if limits else "")

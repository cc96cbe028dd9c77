"""Run every experiment, one after the other, and print one table of what came out.

    python -m experiments.all --quick [--data DIR] [--model DIR] [--only PART ...] [--out DIR]

`--quick` makes everything small: it shows that all of it works, and its numbers mean nothing. Under 20 minutes on two
cores; without it the full sizes, hours, and a run that was stopped goes on. A part that fails is told and the others
go on; the exit status is then 1. Without --data, texts are modules that Python comes with, and parts that need several
kinds of text are left out; so are the figures without matplotlib and the carving without its weights.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.parts import Part, parts
from experiments.tables import markdown

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """What became of a part: ``state`` "done", "failed" or "left out"."""

    name: str
    state: str
    seconds: float
    found: str


def run(part: Part, out: Path, tell: Callable[[str], None]) -> Outcome:
    """Run a part; its output goes to ``out/NAME.log`` and, line by line, to ``tell``."""
    if part.lacks:
        return Outcome(part.name, "left out", 0.0, part.lacks)
    began = time.monotonic()
    with open(out / f"{part.name}.log", "w") as log:
        for command in part.commands:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            last = ""
            for line in process.stdout or ():
                log.write(line)
                last = line.strip() or last
                tell(line.rstrip())
            if process.wait():
                said = f"{' '.join(command[:2])} ended with {process.returncode}: {last}"
                return Outcome(part.name, "failed", time.monotonic() - began, said)
    try:
        found = part.found()
    except (OSError, KeyError, ValueError, StopIteration) as error:
        return Outcome(part.name, "failed", time.monotonic() - began, f"its results cannot be read: {error!r}")
    return Outcome(part.name, "done", time.monotonic() - began, found)


def summary(outcomes: list[Outcome]) -> str:
    """The table of all parts."""
    rows = [[o.name, o.state, f"{o.seconds:.0f} s" if o.seconds else "", o.found] for o in outcomes]
    return markdown(["part", "state", "time", "what came out"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small versions, to see that everything works")
    parser.add_argument("--data", type=Path, help="folder of texts, see experiments/texts.py for their names")
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts only")
    parser.add_argument("--out", type=Path, help="default: runs/quick or runs/all")
    args = parser.parse_args()
    for name in ("data", "model"):  # the parts run in the root of the repository
        if getattr(args, name):
            setattr(args, name, getattr(args, name).resolve())
    args.out = (args.out or ROOT / "runs" / ("quick" if args.quick else "all")).resolve()
    todo = parts(args)
    unknown = set(args.only or ()) - {part.name for part in todo}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in todo)}")
    todo = [part for part in todo if not args.only or part.name in args.only]
    if args.quick and (args.out / "summary.md").exists():
        # What an earlier quick run left would be taken for results of today's code.
        shutil.rmtree(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "summary.md").touch()
    outcomes, began = [], time.monotonic()
    for number, part in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}, {time.monotonic() - began:.0f} s] {part.name}", file=sys.stderr, flush=True)
        outcomes.append(run(part, args.out, lambda line: print(f"    {line}", file=sys.stderr, flush=True)))
        print(f"    {outcomes[-1].state}: {outcomes[-1].found}", file=sys.stderr, flush=True)
        (args.out / "summary.md").write_text(summary(outcomes) + "\n")
    print(summary(outcomes))
    failed = [o.name for o in outcomes if o.state == "failed"]
    print(f"\n{time.monotonic() - began:.0f} s; everything is in {args.out}"
          + (f"; failed: {', '.join(failed)}" if failed else ""))  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

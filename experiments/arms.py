"""What the experiments on policies share: texts, budgets of equal peak bytes, runs that resume, paired differences.

A run scores windows of held-out text through the engine while a KV cache grows beside it
(:mod:`pwjax.evaluate.pressure`). A budget is named by the mean bits that all experts have left at the peak of the KV
cache, so "3" is what all experts at 3 bits and the whole KV cache take, to the byte, and every arm gets the same.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pwjax import environment
from pwjax.checkpoints.artifact import Artifact
from pwjax.evaluate import KVTrace, measure_perplexity
from pwjax.evaluate.comparison import paired_difference
from pwjax.evaluate.texts import Document
from pwjax.loading import open_model, outlook
from pwjax.progress import Bars

# Held-out texts of the data folder, by the domain that they stand for.
DOMAINS = {
    "prose": "books/books.heldout.txt",
    "code": "code/python_stdlib.heldout.txt",
    "math": "math/gsm8k.test.txt",
    "wiki": "wikitext2/wikitext2.test.detok.txt",
}
# Characters of a stretch, for each token that a window needs: a token seldom has more.
CHARACTERS = 12


@dataclass(frozen=True)
class Arm:
    """One way to spend a budget: a policy with its options, or ``bits`` for all experts (the budget is then theirs)."""

    policy: str | None = None
    bits: int | None = None

    @property
    def name(self) -> str:
        """As tables call it."""
        return self.policy or f"{self.bits} bits"


def options(doc: str, out: str) -> argparse.ArgumentParser:
    """The flags that all these experiments have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--data", type=Path, help="folder of held-out texts, see experiments/arms.py for their names")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="in place of --data")
    parser.add_argument("--windows", type=int, default=64, help="of each text")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window, and of every sequence beside it")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in the KV cache, the text one of them")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--out", type=Path, default=Path(out), help="JSON; runs in it are not made again")
    return parser


def texts(args: argparse.Namespace) -> dict[str, list[Document]]:
    """Stretches of each text, one a window, evenly over its length. SystemExit where there is none."""
    files = dict(entry.split("=", 1) for entry in args.text)
    if args.data:
        files |= {name: str(args.data / file) for name, file in DOMAINS.items()}
    if not files:
        sys.exit("give --data DIR, or --text NAME=FILE once or more")
    found, size = {}, CHARACTERS * args.window
    for name, file in files.items():
        whole = Path(file).read_text(encoding="utf-8")
        starts = np.linspace(0, max(0, len(whole) - size), args.windows).astype(int)
        found[name] = [Document(f"{name} {i}", whole[s : s + size]) for i, s in enumerate(starts)]
    return found


def budget_at(artifact: Artifact, bits: float, window: int, sequences: int) -> int:
    """Bytes that hold all experts at ``bits`` (between two widths: that share of the pages) and a full KV cache."""
    roomy = outlook(artifact, batch=sequences, context=window, chunks=(32,))
    memory, table = roomy.memory, roomy.plan.table
    widths = np.array(table.widths)
    pages = np.interp(bits, widths, [table.total_pages(int(b)) for b in widths])
    kv = sequences * roomy.shapes.kv_pages(window)
    return int(memory.total_bytes + (math.ceil(pages) + kv - memory.capacity_pages) * memory.page_bytes)


class Runs:
    """Measured runs, kept in a JSON file after each one, so that an experiment that was stopped goes on."""

    def __init__(self, args: argparse.Namespace, model: Path | None = None, out: Path | None = None):
        self.args, self.artifact = args, open_model(model or args.model)
        self.texts = texts(args)
        self.settings = {
            "windows": args.windows, "window": args.window, "sequences": args.sequences,
            "model": self.artifact.manifest["files"],
        }  # fmt: skip
        self.path, self.runs = out or args.out, {}
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if before["settings"] != self.settings:
                sys.exit(f"{self.path} holds runs of other settings; give another --out")
            self.runs = before["runs"]
        environment.enable_compile_cache()

    def of(self, arm: Arm, budget_bits: float | None, text: str) -> dict:
        """One run, measured unless it is there: ``nll`` a window, ``tokens`` a window, bits, peak, moves.

        ``budget_bits`` None: as much memory as it takes.
        """
        key = f"{arm.name} | {budget_bits} | {text}"
        if key not in self.runs:
            args = self.args
            budget = None if budget_bits is None else budget_at(self.artifact, budget_bits, args.window, args.sequences)
            bars = Bars()
            found = measure_perplexity(
                self.artifact, self.texts[text], budget, bits=arm.bits, policy=arm.policy or "static",
                window=args.window, max_tokens=args.window, kv_trace=KVTrace(alike=args.sequences), progress=bars,
            )  # fmt: skip
            bars.close()
            trace, memory = found.settings["kv_trace"], found.settings["memory"]
            self.runs[key] = {
                "nll": [round(v, 5) for v in found.window_nll.tolist()], "tokens": found.window_tokens.tolist(),
                "mean_bits": found.settings["mean_bits"], "least_bits": trace["mean_bits_min"],
                "budget_bytes": budget, "peak_bytes": memory["peak_bytes"], "stalled": trace["stalled"],
                "dropped": trace["dropped"], "demotions": trace["demotions"], "promotions": trace["promotions"],
            }  # fmt: skip
            print(f"{key}: {self.mean(self.runs[key]):.4f} nats a token, {found.settings['mean_bits']:.2f} bits",
                  file=sys.stderr, flush=True)  # fmt: skip
            self.save()
        return self.runs[key]

    def pooled(self, arm: Arm, budget_bits: float | None, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """``nll`` and ``tokens`` a window, over all texts."""
        found = [self.of(arm, budget_bits, name) for name in (names or self.texts)]
        return {key: np.concatenate([run[key] for run in found]) for key in ("nll", "tokens")}

    @staticmethod
    def mean(run: dict) -> float:
        """Nats a token."""
        return float(np.sum(run["nll"]) / np.sum(run["tokens"]))

    def difference(self, arm: Arm, other: Arm, budget_bits: float, names: Iterable[str] | None = None) -> dict:
        """Nats a token that ``arm`` needs more than ``other`` on the same windows, with a 95 % interval."""
        first, second = (self.pooled(a, budget_bits, names) for a in (arm, other))
        return paired_difference(first["nll"], second["nll"], first["tokens"], self.args.seed)

    def save(self, **more: object) -> None:
        """Write everything, at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "command": " ".join(sys.argv), "settings": self.settings, "versions": environment.versions(),
            **more, "runs": self.runs,
        }  # fmt: skip
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(temporary, self.path)


def interval(found: dict, digits: int = 4) -> str:
    """``+0.0123 [+0.0100, +0.0140]``."""
    low, high = found["interval_95"]
    return f"{found['difference']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

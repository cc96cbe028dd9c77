"""What the experiments on policies share: budgets of equal peak bytes, and runs that resume.

A run scores windows of held-out text through the engine while a KV cache grows beside it
(:mod:`pwjax.evaluate.pressure`). A budget is named by the mean bits that all experts have left at the peak of the KV
cache, so "3" is what all experts at 3 bits and the whole KV cache take, to the byte, and every arm gets the same.
"""

import argparse
import hashlib
import math
import sys
from pathlib import Path

import numpy as np

from experiments import tables, texts
from experiments.paired import Arm, Samples
from pwjax import environment
from pwjax.checkpoints.artifact import Artifact
from pwjax.errors import BudgetError
from pwjax.evaluate import KVTrace, Perplexity, measure_perplexity
from pwjax.evaluate.comparison import compare
from pwjax.loading import open_model, outlook
from pwjax.progress import Bars

WHOLE = Arm(bits=16)


def options(doc: str, out: str) -> argparse.ArgumentParser:
    """The flags that all these experiments have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an artifact; default: the bundled model")
    parser.add_argument("--data", type=Path, help="folder of texts, see experiments/texts.py for their names; default: "
                                                  "modules of Python's standard library")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", default=list(texts.HELD_OUT), choices=texts.HELD_OUT, help="of --data")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="one more held-out text")
    parser.add_argument("--windows", type=int, default=64, help="of each text")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window, and of every sequence beside it")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in the KV cache, the text one of them")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--out", type=Path, default=Path(out), help="JSON; runs in it are not made again")
    return parser


def expert_pages(artifact: Artifact, bits: float) -> float:
    """Pages of all experts at ``bits``; between two widths, that share of the way."""
    table = artifact.table()
    return float(np.interp(bits, table.widths, [table.total_pages(b) for b in table.widths]))


def bits_at(artifact: Artifact, pages: float) -> float:
    """Mean bits at which experts take ``pages``: the inverse of :func:`expert_pages`."""
    table = artifact.table()
    return float(np.interp(pages, [table.total_pages(b) for b in table.widths], table.widths))


def budget_at(artifact: Artifact, bits: float, window: int, sequences: int) -> int:
    """Bytes that hold all experts at ``bits`` and a full KV cache."""
    roomy = outlook(artifact, batch=sequences, context=window, chunks=(32,))
    memory = roomy.memory
    kv = sequences * roomy.shapes.kv_pages(window)
    pages = math.ceil(expert_pages(artifact, bits) - 1e-6) + kv
    return int(memory.total_bytes + (pages - memory.capacity_pages) * memory.page_bytes)


class Runs(Samples):
    """Runs that are measured when they are asked for, kept in a JSON file after each, so a stopped experiment goes on.

    ``models``: artifacts by name; budgets are counted in the bytes of the first.
    """

    def __init__(self, args: argparse.Namespace, models: dict[str, Path | None]):
        self.args = args
        self.artifacts = {name: open_model(path) for name, path in models.items()}
        self.texts = {
            name: texts.stretches(name, text, args.windows, args.window) for name, text in texts.held_out(args).items()
        }
        self.settings = {
            "windows": args.windows, "window": args.window, "sequences": args.sequences,
            "texts": {name: _hash("".join(d.text for d in documents)) for name, documents in self.texts.items()},
            "models": {name: artifact.manifest["files"] for name, artifact in self.artifacts.items()},
        }  # fmt: skip
        self.path, runs = args.out, {}
        if self.path.exists():
            before = tables.read(self.path)
            if before["settings"] != self.settings:
                sys.exit(f"{self.path} holds runs of other settings; give another --out")
            runs = before["runs"]
        super().__init__(runs, list(self.texts), list(models), args.seed)
        self._budgets: dict[float, int] = {}
        self._whole: dict[str, Perplexity] = {}
        environment.enable_compile_cache()

    def of(self, arm: Arm, budget: float | None, text: str) -> dict:
        """One run, measured unless it is there: ``nll``, ``kl`` (from the first model at 16 bits) and ``tokens`` a
        window, bits, bytes, moves; or ``refused``."""
        key = self.key(arm, budget, text)
        if key not in self.runs:
            self.runs[key] = run = self._measured(arm, budget, text)
            said = run.get("refused") or f"{sum(run['nll']) / sum(run['tokens']):.4f} nats a token"
            print(f"{key}: {said}", file=sys.stderr, flush=True)
            self.save()
        return self.runs[key]

    def bytes_of(self, budget: float) -> int:
        """What :func:`budget_at` gives on the first model."""
        if budget not in self._budgets:
            first = next(iter(self.artifacts.values()))
            self._budgets[budget] = budget_at(first, budget, self.args.window, self.args.sequences)
        return self._budgets[budget]

    def _perplexity(self, arm: Arm, size: int | None, text: str) -> Perplexity:
        args, bars = self.args, Bars()
        try:
            return measure_perplexity(
                self._artifact(arm), self.texts[text], size, bits=arm.bits, policy=arm.policy or "static",
                window=args.window, max_tokens=args.window, kv_trace=KVTrace(alike=args.sequences), keep=True,
                progress=bars,
            )  # fmt: skip
        finally:
            bars.close()

    def _artifact(self, arm: Arm) -> Artifact:
        return self.artifacts[arm.model or self.models[0]]

    def _at_16_bits(self, text: str) -> Perplexity:
        """The first model without a budget, which divergence is from."""
        if text not in self._whole:
            self._whole[text] = self._perplexity(WHOLE, None, text)
        return self._whole[text]

    def _measured(self, arm: Arm, budget: float | None, text: str) -> dict:
        size = None if budget is None else self.bytes_of(budget)
        try:
            found = self._at_16_bits(text) if (arm, budget) == (WHOLE, None) else self._perplexity(arm, size, text)
        except BudgetError as error:
            return {"refused": str(error)}
        trace, memory = found.settings["kv_trace"], found.settings["memory"]
        divergence = compare(self._artifact(arm), found.run, self._at_16_bits(text).run, self.seed)["window_kl"]
        return {
            "nll": [round(v, 5) for v in found.window_nll.tolist()], "tokens": found.window_tokens.tolist(),
            "kl": [round(v, 5) for v in divergence],
            "mean_bits": found.settings["mean_bits"], "least_bits": trace["mean_bits_min"],
            "budget_bytes": size, "peak_bytes": memory["peak_bytes"], "stalled": trace["stalled"],
            "dropped": trace["dropped"], "demotions": trace["demotions"], "promotions": trace["promotions"],
        }  # fmt: skip

    def save(self, **more: object) -> None:
        """Write everything, at once; ``more``: what was made of the runs."""
        tables.write(self.path, settings=self.settings, seed=self.seed, **more, runs=self.runs)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

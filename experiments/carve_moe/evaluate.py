"""Perplexity of the dense and the carved model on held-out text, and how even routing is.

python -m experiments.carve_moe.evaluate --data DIR --work WORK [--windows 20] [--hf DIR] [--out FILE]

The first ``--windows`` non-overlapping windows of each text, without a start token; every token of a window but its
first is scored. ``--hf`` is a checkpoint that ``export.py`` wrote, run by pwjax's own model; without it,
``WORK/distill`` is run in the form that it is trained in. Standard errors are those of window means. Writes JSON as it
goes.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from experiments.carve_moe import smollm2
from experiments.carve_moe.data import EVALUATION
from experiments.carve_moe.export import load_distilled
from experiments.carve_moe.model import linear, moe_config, run_layers
from experiments.texts import encode, read
from pwjax import models
from pwjax.checkpoints.hf import load_hf
from pwjax.environment import versions


def windows_of(tokenizer: Tokenizer, path: Path, count: int, window: int) -> np.ndarray:
    """int32[n, window] first windows of a text, ``n`` at most ``count``."""
    # Eight characters a token are more than enough.
    ids = encode(tokenizer, read(path)[: 8 * count * window], np.int32)
    return ids[: len(ids) // window * window].reshape(-1, window)[:count]


def training_form(config, params):
    """``nll(row int32[1, T]) -> (float32[T - 1], counts float32[L, E] or None)`` of ``model.py``'s forward."""

    @jax.jit
    def run(params, row):
        hidden, (_, _, routed) = run_layers(config, params, row)
        scores = jax.nn.log_softmax(linear(hidden[0, :-1], params["embed"]["embedding"]), -1)
        counts = None if routed is None else routed.chosen[:, :-1].sum(1)
        return -jnp.take_along_axis(scores, row[0, 1:, None], -1)[:, 0], counts

    return lambda row: run(params, row)


def checkpoint_form(config, params):
    """The same of pwjax's model."""

    @jax.jit
    def run(params, row):
        nll, out = models.next_token_nll(config, params, row)
        return nll[0], out.stats.count

    return lambda row: run(params, row)


def measure(nll, windows: np.ndarray) -> dict:
    """Perplexity of ``windows``, its standard error (delta method) and selection counts."""
    means, counts = [], []
    for row in windows:
        losses, count = nll(row[None])
        means.append(float(np.asarray(losses, np.float64).mean()))
        counts.append(None if count is None else np.asarray(count, np.float64))
    mean, error = np.mean(means), np.std(means, ddof=1) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    return {
        "perplexity": float(np.exp(mean)), "standard_error": float(np.exp(mean) * error),
        "tokens": int(windows.size), "window_nll": means,
        "counts": None if counts[0] is None else np.sum(counts, axis=0),
    }  # fmt: skip


def selection(counts: np.ndarray, tokens: int) -> dict:
    """Least and greatest share of ``tokens`` that chose an expert, a layer, of counts [L, E]."""
    rates = counts / tokens
    return {
        "least": [round(float(r), 3) for r in rates.min(1)],
        "greatest": [round(float(r), 3) for r in rates.max(1)],
        "range": [float(rates.min()), float(rates.max())],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--hf", type=Path, help="exported checkpoint to run in place of WORK/distill")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--windows", type=int, default=20, help="of each text")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--texts", nargs="+", default=list(EVALUATION), choices=list(EVALUATION))
    parser.add_argument("--arms", nargs="+", default=["dense", "carved"], choices=["dense", "carved"])
    parser.add_argument("--out", type=Path, help="JSON file; standard output if not given")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    arms = {}
    if "carved" in args.arms and args.hf:
        config, params = load_hf(args.hf)
        arms["carved"] = checkpoint_form(config, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    elif "carved" in args.arms:
        config, params = load_distilled(args.work, args.top_k)
        arms["carved"] = training_form(config, jax.tree.map(jnp.asarray, params))
    if "dense" in args.arms:
        dense = jax.tree.map(jnp.asarray, smollm2.read_dense(smollm2.find_gguf()))
        arms["dense"] = training_form(moe_config(args.top_k), dense)
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    settings["form"] = "checkpoint" if args.hf else "training"
    results: dict = {"settings": settings, "versions": versions(), "texts": {}}
    total = 0
    for text in args.texts:
        windows = windows_of(tokenizer, args.data / EVALUATION[text], args.windows, args.window)
        results["texts"][text] = {}
        for arm, nll in arms.items():
            began = time.perf_counter()
            found = measure(nll, windows)
            counts = found.pop("counts")
            if counts is not None:
                total = total + counts
                found["selection_rates"] = selection(counts, windows.shape[0] * (windows.shape[1] - 1))
            results["texts"][text][arm] = {**found, "seconds": time.perf_counter() - began}
            told = f"{text} {arm}: {found['perplexity']:.3f} ± {found['standard_error']:.3f}"
            print(told, file=sys.stderr, flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    if not args.out:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

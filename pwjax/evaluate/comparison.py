"""Two runs over the same windows: KL divergence, agreement of the likeliest token, and the paired difference.

A run keeps the final hidden state of every prediction (float32, hidden size a token), from which the head gives the
whole distribution again: exact, and far smaller than logits. The head is never quantized, so all runs of a checkpoint
share it.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from calib.agreement import bootstrap
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.manifest import DENSE
from pwjax.config import ModelConfig
from pwjax.errors import PWJaxError, UsageError
from pwjax.evaluate.divergence import kl_from_logits
from pwjax.evaluate.program import HEAD_TOKENS
from pwjax.models import logits

SCHEMA = "pwjax-ppl-1"
# Tokens whose hidden states are on the device at the same time.
PART_TOKENS = 32 * HEAD_TOKENS


@dataclass(frozen=True, eq=False)
class Run:
    """What is kept of a run to compare others with.

    ``nll`` float64[windows] and ``count`` int64[windows]: nats of the scored tokens of each window, and how many;
    ``hidden`` float32[tokens, H] of these, window by window. ``windows``: sha256 of the windows; ``head``: sha256 of
    what the head belongs to. ``settings``: JSON-ready, says which run it was.
    """

    nll: np.ndarray
    count: np.ndarray
    hidden: np.ndarray
    windows: str
    head: str
    settings: dict

    def save(self, path: str | os.PathLike) -> None:
        """Write it to ``path`` at once. PWJaxError where that fails."""
        target = Path(path)
        temporary = target.with_name(target.name + ".tmp")
        about = {"schema": SCHEMA, "windows": self.windows, "head": self.head, "settings": self.settings}
        try:
            with open(temporary, "wb") as file:
                np.savez(file, about=json.dumps(about), nll=self.nll, count=self.count, hidden=self.hidden)
            os.replace(temporary, target)
        except OSError as error:
            raise PWJaxError(f"cannot write the run to {target}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Run":
        """Read what :meth:`save` wrote; UsageError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as data:
                about = json.loads(str(data["about"]))
                if about["schema"] != SCHEMA:
                    raise ValueError(about["schema"])
                arrays = {name: data[name] for name in ("nll", "count", "hidden")}
            return cls(**arrays, windows=about["windows"], head=about["head"], settings=about["settings"])
        except OSError as error:
            raise UsageError(f"cannot read the run {path}: {error.strerror or error}") from error
        except Exception as error:  # zipfile, json and NumPy have their own each
            raise UsageError(f"{path} is no run that `pwjax ppl --save` wrote") from error


def windows_hash(windows) -> str:
    """Hex sha256 of tokens and first scored token of all windows."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(np.array([len(window.tokens), window.first], "<i8").tobytes())
        digest.update(np.asarray(window.tokens, "<i4").tobytes())
    return digest.hexdigest()


def head_hash(artifact: Artifact) -> str:
    """What runs must share to be compared by hidden states: the parameters that are never quantized."""
    return artifact.manifest["files"][DENSE]["sha256"]


def compare(artifact: Artifact, run: Run, reference: Run, seed: int = 0) -> dict:
    """``run`` against ``reference``, JSON-ready: ``kl`` in nats a token, KL(reference || run), ``top1`` the share of
    tokens for which both find the same token likeliest, each with a standard error over windows and the samples a
    window, and ``nll``, the :func:`paired_difference`. UsageError where they are not of the same windows and head."""
    for name, ours, theirs in (("windows", run.windows, reference.windows), ("model", run.head, reference.head)):
        if ours != theirs:
            raise UsageError(f"the other run is of other {name}; compare runs of one text, --window and checkpoint")
    kl, same = _per_token(artifact, reference.hidden, run.hidden)
    borders = np.concatenate([[0], np.cumsum(run.count)[:-1]])
    kl, same = (np.add.reduceat(values.astype(np.float64), borders) for values in (kl, same))
    return {
        "kl": float(kl.sum() / run.count.sum()),
        "kl_stderr": ratio_stderr(kl, run.count),
        "top1": float(same.sum() / run.count.sum()),
        "top1_stderr": ratio_stderr(same, run.count),
        "nll": paired_difference(run.nll, reference.nll, run.count, seed),
        "window_kl": kl.tolist(),
        "window_top1": same.tolist(),
    }


def _per_token(artifact: Artifact, reference: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL float32[n] and whether the likeliest token is the same, bool[n]."""
    config = artifact.config
    params = jax.tree.map(jnp.asarray, artifact.dense_params())
    params = {name: params[name] for name in ("embed", "lm_head") if name in params}
    program, kl, same = jax.jit(partial(_distributions, config)), [], []
    for start in range(0, len(hidden), PART_TOKENS):
        pair = np.stack([reference[start : start + PART_TOKENS], hidden[start : start + PART_TOKENS]])
        count = pair.shape[1]
        pair = np.pad(pair, ((0, 0), (0, PART_TOKENS - count), (0, 0)))
        found = jax.device_get(program(params, pair))
        kl.append(found[0][:count])
        same.append(found[1][:count])
    return np.concatenate(kl), np.concatenate(same)


def _distributions(config: ModelConfig, params: dict, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of hidden states float32[2, n, H], reference first."""
    parts = jnp.moveaxis(pair.reshape(2, -1, HEAD_TOKENS, pair.shape[-1]), 1, 0)

    def one(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        reference, scores = logits(config, params, part)
        return kl_from_logits(reference, scores), reference.argmax(-1) == scores.argmax(-1)

    kl, same = lax.map(one, parts)
    return kl.reshape(-1), same.reshape(-1)


def ratio_stderr(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Standard error of ``sum(sums) / sum(counts)`` with windows as samples; None where there is only one.

    Tokens of a window depend on each other. With residuals ``r = sums - ratio * counts`` of n windows,
    ``var = n/(n-1) * sum(r^2) / sum(counts)^2`` (delta method).
    """
    n = len(sums)
    if n < 2:
        return None
    residual = sums - sums.sum() / counts.sum() * counts
    return math.sqrt(n / (n - 1) * float((residual**2).sum())) / float(counts.sum())


def paired_difference(first: np.ndarray, second: np.ndarray, counts: np.ndarray, seed: int = 0) -> dict:
    """Mean of ``first - second`` a token: ``{"difference", "stderr", "interval_95"}``, windows as samples.

    ``first`` and ``second`` float64[windows] are sums over the same ``counts`` int64[windows] tokens. The interval is
    a percentile bootstrap that draws windows, the same of both (None where there is only one). ValueError where shapes
    differ.
    """
    first, second, counts = (np.asarray(a, np.float64) for a in (first, second, counts))
    if not first.shape == second.shape == counts.shape or first.ndim != 1 or not first.size:
        raise ValueError(f"runs of the same windows are compared, got {len(first)}, {len(second)} and {len(counts)}")
    excess = first - second
    interval = None
    if len(excess) > 1:
        interval = list(bootstrap(lambda i: excess[i].sum(1) / counts[i].sum(1), len(excess), seed))
    return {
        "difference": float(excess.sum() / counts.sum()), "stderr": ratio_stderr(excess, counts),
        "interval_95": interval,
    }  # fmt: skip

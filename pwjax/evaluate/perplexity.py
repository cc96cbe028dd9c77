"""Perplexity with its standard error, and bits per byte, which compare across tokenizers."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.text import Tokenizer
from pwjax.environment import versions
from pwjax.errors import ArtifactError, PWJaxError, UsageError
from pwjax.evaluate.program import Report
from pwjax.evaluate.scorer import BATCH, Scorer, checked_window
from pwjax.evaluate.texts import Document, heldout_documents
from pwjax.evaluate.windows import Window, cut, leading_bos, tokenize
from pwjax.loading import open_model
from pwjax.progress import Progress, silent

STDERR = "perplexity times the standard error of the mean NLL, a ratio estimate with windows as the sampling units"


@dataclass(frozen=True, eq=False)
class Perplexity:
    """What a model makes of a text.

    ``window_nll`` float64[n] nats and ``window_tokens`` int64[n]: sums over the scored tokens of each window, the same
    windows for every model with this tokenizer, so two results can be compared pairwise. ``bytes``: UTF-8 bytes of
    the scored tokens. ``settings``: everything else that a report states, JSON-ready.
    """

    window_nll: np.ndarray
    window_tokens: np.ndarray
    bytes: int
    settings: dict

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return int(self.window_tokens.sum())

    @property
    def mean_nll(self) -> float:
        """Nats a scored token."""
        return float(self.window_nll.sum() / self.tokens)

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean negative log-likelihood of a token."""
        return math.exp(self.mean_nll)

    @property
    def stderr(self) -> float | None:
        """Standard error of the perplexity; None where there is only one window.

        Tokens of a window depend on each other, so the windows are the samples: with residuals
        ``r = window_nll - mean_nll * window_tokens``, ``var(mean) = n/(n-1) * sum(r^2) / tokens^2`` (delta method).
        """
        count = len(self.window_nll)
        if count < 2:
            return None
        residual = self.window_nll - self.mean_nll * self.window_tokens
        return self.perplexity * math.sqrt(count / (count - 1) * float((residual**2).sum())) / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits that the scored tokens take, by the byte of their text."""
        return float(self.window_nll.sum()) / math.log(2) / self.bytes

    def to_json(self) -> dict:
        """The object that ``pwjax ppl --json`` prints."""
        return {
            "perplexity": self.perplexity,
            "stderr": self.stderr,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
            **self.settings,
            "windows": len(self.window_nll),
            "stderr_method": STDERR,
        }


def measure_perplexity(
    model: str | os.PathLike | Artifact | None = None,
    documents: Sequence[Document] | None = None,
    memory_budget: int | str | None = None,
    *,
    bits: int | np.ndarray | None = None,
    policy: str = "static",
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int = BATCH,
    report: Report | None = None,
    progress: Progress = silent,
) -> Perplexity:
    """Perplexity of ``model`` on ``documents`` (None: held-out modules of the standard library).

    ``window``, ``stride``: see :mod:`pwjax.evaluate.windows`; ``max_tokens`` of text in all; ``report`` is told what
    is compiled; the rest as in :meth:`Scorer.load`. UsageError, BudgetError, ArtifactError.
    """
    artifact = model if isinstance(model, Artifact) else open_model(model)
    config = artifact.config
    if artifact.tokenizer_path is None:
        raise ArtifactError(f"{artifact.path} has no tokenizer.json, so text cannot be scored")
    tokenizer = Tokenizer.load(artifact.tokenizer_path, config.bos_token_id)
    window, bos = checked_window(window, config), leading_bos(tokenizer)
    room = window - (bos is not None)
    stride = room if stride is None else stride
    if not 1 <= stride <= window:
        raise UsageError(f"--stride must be from 1 to the window of {window} tokens, got {stride}")
    stride = min(stride, room)
    documents = heldout_documents() if documents is None else documents
    windows, names = _windows(documents, tokenizer, config.vocab_size, window, stride, bos, max_tokens)
    with Scorer.load(
        artifact, memory_budget, bits=bits, policy=policy, window=window, batch=batch, report=report,
        progress=lambda done, total: progress("loading blocks", done, total),
    ) as scorer:  # fmt: skip
        scores = scorer.score([w.tokens for w in windows], lambda done, total: progress("scoring windows", done, total))
        # A prediction of token i is at place i - 1.
        sums = [float(nll[w.first - 1 :].sum(dtype=np.float64)) for w, nll in zip(windows, scores, strict=True)]
        if not np.isfinite(sums).all():
            raise PWJaxError("the model gives likelihoods that are not finite; its parameters may be damaged")
        settings = _settings(scorer) | {
            "stride": stride,
            "bos": "none" if bos is None else "every window",
            "bos_token_id": bos,
            "text": names,
        }
    count = np.array([len(w.tokens) - w.first for w in windows])
    return Perplexity(np.array(sums), count, sum(w.bytes for w in windows), settings)


def _windows(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    vocab_size: int,
    window: int,
    stride: int,
    bos: int | None,
    max_tokens: int | None,
) -> tuple[list[Window], list[str]]:
    """Windows of all documents, and which those are; UsageError where they hold nothing that can be predicted."""
    windows, names, left = [], [], max_tokens
    for document in documents:
        tokens = tokenize(document, tokenizer, vocab_size)
        if left is not None:
            tokens = type(tokens)(tokens.ids[:left], tokens.ends[:left])
            left -= len(tokens.ids)
        own = list(cut(tokens, window, stride, bos))
        if own:
            windows += own
            names.append(document.name)
    if not windows or not sum(w.bytes for w in windows):
        raise UsageError("the text is too short: it takes at least two tokens, one to be predicted from the other")
    return windows, names


def _settings(scorer: Scorer) -> dict:
    plan, memory = scorer.plan, scorer.memory
    histogram = {str(b): n for b, n in plan.table.histogram(plan.bits).items()}
    return {
        # One width for all blocks, or null for a mixed plan.
        "bits": int(plan.bits[0]) if np.all(plan.bits == plan.bits[0]) else None,
        "mean_bits": plan.table.mean_bits(plan.bits),
        "histogram": histogram,
        "memory": {
            "budget_bytes": memory.budget_bytes,
            "peak_bytes": scorer.peak_bytes,
            **memory.rows,
            "page_bytes": memory.page_bytes,
            "pages_total": memory.num_pages,
            "smallest_budget_bytes": memory.smallest_budget_bytes,
        },
        "window": scorer.shapes.window,
        "batch": scorer.shapes.batch,
        "kv_dtype": "float32",
        "versions": versions(),
    }

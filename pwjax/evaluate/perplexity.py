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
from pwjax.evaluate.comparison import Run, head_hash, ratio_stderr, windows_hash
from pwjax.evaluate.pressure import KVTrace, PressureScorer
from pwjax.evaluate.program import Report
from pwjax.evaluate.scorer import BATCH, Scorer, checked_window
from pwjax.evaluate.texts import Document, heldout_documents
from pwjax.evaluate.windows import Window, cut, leading_bos, tokenize
from pwjax.loading import open_model
from pwjax.progress import Progress, silent

STDERR = "perplexity times the standard error of the mean NLL, a ratio estimate with windows as the sampling units"


@dataclass(frozen=True, eq=False)
class Perplexity:
    """What a model makes of texts.

    ``window_nll`` float64[n] nats and ``window_tokens`` int64[n]: sums over the scored tokens of each window, the same
    windows for every model with this tokenizer, so two results can be compared pairwise. ``window_bytes`` int64[n]:
    UTF-8 bytes of the scored tokens; ``window_text`` int64[n]: index into ``settings["text"]``. ``settings``:
    everything else that a report states, JSON-ready. ``run``: what is kept for comparisons, where that was asked for.
    """

    window_nll: np.ndarray
    window_tokens: np.ndarray
    window_bytes: np.ndarray
    window_text: np.ndarray
    settings: dict
    run: Run | None = None

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return int(self.window_tokens.sum())

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the scored tokens."""
        return int(self.window_bytes.sum())

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
        """Standard error of the perplexity, windows being the samples; None where there is only one."""
        error = ratio_stderr(self.window_nll, self.window_tokens)
        return None if error is None else self.perplexity * error

    @property
    def bits_per_byte(self) -> float:
        """Bits that the scored tokens take, by the byte of their text."""
        return float(self.window_nll.sum()) / math.log(2) / self.bytes

    def of_text(self, index: int) -> "Perplexity":
        """The windows of one text."""
        own = self.window_text == index
        nll, tokens, size = self.window_nll[own], self.window_tokens[own], self.window_bytes[own]
        return Perplexity(nll, tokens, size, self.window_text[own], self.settings)

    def figures(self) -> dict:
        """Perplexity, standard error, bits per byte and what they count, JSON-ready."""
        return {
            "perplexity": self.perplexity,
            "stderr": self.stderr,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "windows": len(self.window_nll),
        }

    def to_json(self) -> dict:
        """The object that ``pwjax ppl --json`` prints; ``window_*`` are the raw samples."""
        names = self.settings["text"]
        return {
            **self.figures(),
            **self.settings,
            "stderr_method": STDERR,
            "texts": [{"name": name, **self.of_text(i).figures()} for i, name in enumerate(names)],
            "window_nll": self.window_nll.tolist(),
            "window_tokens": self.window_tokens.tolist(),
            "window_text": self.window_text.tolist(),
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
    kv_trace: KVTrace | None = None,
    kv_dtype: str = "bfloat16",
    keep: bool = False,
    report: Report | None = None,
    progress: Progress = silent,
) -> Perplexity:
    """Perplexity of ``model`` on ``documents`` (None: held-out modules of the standard library).

    ``window``, ``stride``: see :mod:`pwjax.evaluate.windows`; ``max_tokens`` of each text. Without ``kv_trace``,
    windows are seen whole (``batch`` at a time, :meth:`Scorer.load`); with it they go through the engine while a KV
    cache of ``kv_dtype`` grows beside them (:mod:`pwjax.evaluate.pressure`), and any ``policy`` may move precision.
    ``keep``: have a :class:`Run` to compare with; ``report`` is told what is compiled. UsageError, BudgetError,
    ArtifactError.
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
    windows, owners, names, left_out = _windows(
        documents, tokenizer, config.vocab_size, window, stride, bos, max_tokens
    )
    loading = lambda done, total: progress("loading blocks", done, total)  # noqa: E731
    if kv_trace is None:
        scorer = Scorer.load(
            artifact, memory_budget, bits=bits, policy=policy, window=window, batch=batch, hidden=keep, report=report,
            progress=loading,
        )  # fmt: skip
    else:
        scorer = PressureScorer.load(
            artifact, memory_budget, kv_trace, window=window, bits=bits, policy=policy, kv_dtype=kv_dtype,
            report=report, progress=loading,
        )  # fmt: skip
    sums, hidden = [], []
    with scorer:
        tokens = [w.tokens for w in windows]
        scored = scorer.score(tokens, lambda done, total: progress("scoring windows", done, total))
        for w, one in zip(windows, scored, strict=True):
            # A prediction of token i is at place i - 1.
            sums.append(float(one.nll[w.first - 1 :].sum(dtype=np.float64)))
            if keep and one.hidden is not None:
                hidden.append(one.hidden[w.first - 1 :])
        if not np.isfinite(sums).all():
            raise PWJaxError("the model gives likelihoods that are not finite; its parameters may be damaged")
        settings = scorer.settings() | {
            "policy": "fixed" if bits is not None else policy,
            "stride": stride,
            "bos": "none" if bos is None else "every window",
            "bos_token_id": bos,
            "text": names,
            "left_out": left_out,
            "windows_sha256": windows_hash(windows),
            "versions": versions(),
        }
    count, size = np.array([len(w.tokens) - w.first for w in windows]), np.array([w.bytes for w in windows])
    run = None
    if keep:
        run = Run(
            np.array(sums), count, np.concatenate(hidden), settings["windows_sha256"], head_hash(artifact), settings
        )
    return Perplexity(np.array(sums), count, size, owners, settings, run)


def _windows(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    vocab_size: int,
    window: int,
    stride: int,
    bos: int | None,
    max_tokens: int | None,
) -> tuple[list[Window], np.ndarray, list[str], list[str]]:
    """Windows of all documents, the index of each one's document int64[n], the names of these documents, and those of
    documents that are too short to have any.

    UsageError where they hold nothing that can be predicted.
    """
    windows, owners, names, left_out = [], [], [], []
    for document in documents:
        tokens = tokenize(document, tokenizer, vocab_size)
        if max_tokens is not None:
            tokens = type(tokens)(tokens.ids[:max_tokens], tokens.ends[:max_tokens])
        own = list(cut(tokens, window, stride, bos))
        if own:
            owners += [len(names)] * len(own)
            windows += own
            names.append(document.name)
        else:
            left_out.append(document.name)
    if not windows or not sum(w.bytes for w in windows):
        raise UsageError("the text is too short: it takes at least two tokens, one to be predicted from the other")
    return windows, np.array(owners), names, left_out

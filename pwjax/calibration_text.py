"""Calibration text: files and JSONL to token windows, mixed by weight, and what the manifest says of them."""

import copy
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib.text import POOL, Windows, thin
from calib.text import windows as cut_windows
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError, UsageError

# Tokens that calibration uses, in sequences of this length: 128 x 512. Any-Precision's own default is 100 x 512.
TOKENS = 65536
SEQUENCE_LENGTH = 512

# The longest text that is read.
_MAX_CHARS = 16 << 20
# Characters of a long token: texts are thinned by it before they are tokens.
_TOKEN_CHARS = 8

Text = str | os.PathLike | Sequence[str] | Sequence[os.PathLike] | Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """Candidate ``windows``, how they are mixed (``weights`` of the sources) and the ``seed`` of the drawn loss."""

    windows: Windows
    weights: tuple[float, ...]
    seed: int

    @property
    def count(self) -> int:
        """Windows that calibration uses."""
        return int(self.windows.quota.sum())

    def facts(self) -> dict:
        """For the manifest: every source's candidates by hash, how many windows are used, its weight."""
        sources = []
        for number, (quota, weight) in enumerate(zip(self.windows.quota, self.weights, strict=True)):
            own = self.windows.tokens[self.windows.source == number].astype("<i4")
            sha = hashlib.sha256(own.tobytes()).hexdigest()
            sources.append({"sha256": sha, "candidates": len(own), "windows": int(quota), "weight": weight})
        length = self.windows.tokens.shape[1]
        return {
            "texts": sources,
            "windows": self.count,
            "window_tokens": length,
            "tokens": self.count * length,
            "seed": self.seed,
        }


def calibration_text(
    text: Text,
    config: ModelConfig,
    tokenizer: Any = None,
    tokens: int = TOKENS,
    sequence_length: int = SEQUENCE_LENGTH,
    weights: Sequence[float] | None = None,
    seed: int = 0,
) -> CalibrationText:
    """Windows for calibration from ``text``, up to ``tokens`` tokens in all.

    ``text``: a string, a path to a text file or to a JSONL file whose lines have a ``"text"``, a sequence of either
    (each a source with its weight, equal if None), or token ids (one sequence, or windows [n, T] that are taken as they
    are). ``tokenizer``: what :func:`load_tokenizer` takes. Where a source is long enough there are more candidates than
    are used, so that those can be chosen which reach rare experts. UsageError, with a sentence, for text that cannot be
    used.
    """
    length = min(sequence_length, config.max_positions)
    count = max(1, tokens // length)
    pieces: list = [text] if isinstance(text, str | os.PathLike) else list(text)
    ids = [p for p in pieces if not isinstance(p, str | os.PathLike)]
    try:
        if ids and len(ids) == len(pieces):
            array = np.asarray(text)
            if array.ndim == 2:
                found = Windows(array.astype(np.int32), np.zeros(len(array), int), np.array([len(array)]))
            else:
                found = cut_windows([array], length, count, weights=weights, pool=POOL)
        else:
            encode = None if tokenizer is None else _encoder(load_tokenizer(tokenizer), length, count)
            texts = [p if isinstance(p, str) else read_text(Path(p)) for p in pieces]
            found = cut_windows(texts, length, count, encode, config.bos_token_id, weights, POOL)
    except ValueError as error:
        raise UsageError(f"the calibration text cannot be used: {error}") from error
    low, high = int(found.tokens.min()), int(found.tokens.max())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise UsageError(f"calibration token {wrong} is not in the vocabulary of {config.vocab_size}")
    shares = tuple(map(float, weights)) if weights is not None else (1.0,) * len(found.quota)
    return CalibrationText(found, shares, seed)


def load_tokenizer(source: Any):
    """A ``tokenizers.Tokenizer`` from one, from ``tokenizer.json``, or from a directory that has it."""
    from tokenizers import Tokenizer

    if isinstance(source, Tokenizer):
        return source
    path = Path(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from error


def read_text(path: Path) -> str:
    """A text file, or the ``"text"`` of every line of a ``.jsonl`` file, blank lines between; UsageError if it has
    none, or is not UTF-8."""
    try:
        with open(path, encoding="utf-8") as file:
            text = _join_lines(path, file) if path.suffix == ".jsonl" else file.read(_MAX_CHARS)
    except OSError as error:
        raise UsageError(f"cannot read the calibration text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the calibration text {path} is not UTF-8: {error.reason}") from error
    if not text.strip():
        raise UsageError(f"the calibration text {path} is empty")
    return text


def _join_lines(path: Path, file) -> str:
    texts, size = [], 0
    for number, line in enumerate(file, 1):
        if size > _MAX_CHARS:
            break
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UsageError(f'line {number} of {path} is not a JSON object with a "text"')
        texts.append(text)
        size += len(text)
    return "\n\n".join(texts)


def _encoder(tokenizer, length: int, count: int):
    """Token ids of a text, thinned where it has far more than ``count`` windows can take."""
    piece, most = 16 * length * _TOKEN_CHARS, POOL * count * length * _TOKEN_CHARS
    # A tokenizer.json can carry the truncation and padding of its training run; the caller's own object stays as it is.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        pieces = (tokenizer.encode(part, add_special_tokens=False).ids for part in thin(text, most, piece))
        return [token for ids in pieces for token in ids]

    return encode

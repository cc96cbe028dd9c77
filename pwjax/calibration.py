"""Calibration of a model for quantization: token windows, importance of expert weights, routing mass.

Joins ``calib``, which knows no model, to ours; results go to a scratch directory layer by layer, so that an
interrupted conversion does not repeat them.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from calib.sensitivity import routing_shares, squared_gradients
from calib.text import windows as cut_windows
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError, UsageError
from pwjax.progress import Progress

NAMES = ("gate_up", "down")

# Any-Precision's own default is 100 x 512.
WINDOWS = 128
WINDOW_TOKENS = 512

# The longest text of which every token is looked at; more would only be thinned to WINDOWS windows again.
_MAX_CHARS = 16 << 20

Text = str | os.PathLike | Sequence[str] | Sequence[os.PathLike] | Sequence[int] | np.ndarray


def token_windows(
    text: Text, config: ModelConfig, tokenizer: Any = None, count: int = WINDOWS, length: int = WINDOW_TOKENS
) -> np.ndarray:
    """Calibration windows ``int32[n, T]`` from ``text``.

    ``text``: a string, a path to a text file, a sequence of either, or token ids (one sequence, or windows [n, T]
    that are taken as they are). ``tokenizer``: what :func:`load_tokenizer` takes. UsageError, with a sentence, for
    text that cannot be used.
    """
    length = min(length, config.max_positions)
    pieces: list = [text] if isinstance(text, str | os.PathLike) else list(text)
    ids = [p for p in pieces if not isinstance(p, str | os.PathLike)]
    try:
        if ids and len(ids) == len(pieces):
            array = np.asarray(text)
            ready = array.astype(np.int32) if array.ndim == 2 else cut_windows([array], length, count)
        else:
            encode = None if tokenizer is None else _encoder(load_tokenizer(tokenizer))
            texts = [p if isinstance(p, str) else _read_text(Path(p)) for p in pieces]
            ready = cut_windows(texts, length, count, encode, config.bos_token_id)
    except ValueError as error:
        raise UsageError(f"the calibration text cannot be used: {error}") from error
    low, high = int(ready.min()), int(ready.max())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise UsageError(f"calibration token {wrong} is not in the vocabulary of {config.vocab_size}")
    return ready


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


class Calibration:
    """Importance and routing mass of a model; importance is None where no text was given.

    Made by :meth:`uniform` or :meth:`run`. ``routing_mass`` float64[L, E], every layer sums to 1.
    """

    def __init__(self, routing_mass: np.ndarray, summary: dict, scratch: Path | None):
        self.routing_mass, self.summary, self._scratch = routing_mass, summary, scratch

    def importance(self, layer: int, matrix: int) -> np.ndarray | None:
        """Summed squared gradients float32[E, out, in] of one layer, or None for equal weights."""
        return None if self._scratch is None else np.load(_file(self._scratch, layer, matrix))

    @classmethod
    def uniform(cls, config: ModelConfig) -> "Calibration":
        """No text: every weight counts once and every expert is as likely as any other."""
        mass = np.full((config.num_layers, config.num_experts), 1 / config.num_experts)
        summary = {
            "damage": ["unweighted"],
            "importance": "none: squared error of the weights, every weight counted once",
            "routing_mass": "uniform: no text was given",
            "windows": 0,
        }
        return cls(mass, summary, None)

    @classmethod
    def run(
        cls, flat: dict, config: ModelConfig, windows: np.ndarray, scratch: Path, progress: Progress
    ) -> "Calibration":
        """Squared gradients of the mean next-token loss over ``windows`` int32[n, T], kept in ``scratch``.

        ``flat`` are all parameters by flat name. A finished calibration in ``scratch`` is taken as it is.
        UsageError where the loss is not finite.
        """
        facts = scratch / "calibration.json"
        if not facts.exists():
            _write_gradients(flat, config, windows, scratch, progress)
        stored = json.loads(facts.read_text())
        summary = {
            "damage": ["paper"],
            "importance": "squared gradients of the mean next-token loss, summed over windows (empirical Fisher)",
            "routing_mass": "share of the router weight on the calibration windows",
            "windows": windows.shape[0],
            "window_tokens": windows.shape[1],
            "tokens_sha256": hashlib.sha256(windows.astype("<i4").tobytes()).hexdigest(),
            "mean_loss": stored["mean_loss"],
        }
        return cls(np.load(scratch / "routing_mass.npy"), summary, scratch)


def _write_gradients(flat: dict, config: ModelConfig, windows: np.ndarray, scratch: Path, progress: Progress) -> None:
    from pwjax.checkpoints.tree import EXPERTS, unflatten
    from pwjax.models import loss_fn, routing_mass

    whole, mass = loss_fn(config), routing_mass(config)
    # Float32 from the bfloat16 values that the artifact keeps: the loss is that of the model as stored.
    flat = {name: jnp.asarray(value, jnp.float32) for name, value in flat.items()}
    experts = {name: flat[name] for name in EXPERTS}
    rest = {name: value for name, value in flat.items() if name not in EXPERTS}
    join = lambda e, r: unflatten({**r, **e})  # noqa: E731
    try:
        importance, losses = squared_gradients(
            lambda params, tokens: whole(params, tokens[None])[0],
            join,
            experts,
            rest,
            windows,
            lambda done, total: progress("calibrating", done, total),
        )
    except ValueError as error:
        raise UsageError(f"calibration failed: {error}") from error
    shares = routing_shares(lambda params, tokens: mass(params, tokens[None]), unflatten(flat), windows)
    for matrix, name in enumerate(EXPERTS):
        for layer in range(config.num_layers):
            np.save(_file(scratch, layer, matrix), importance[name][layer])
    np.save(scratch / "routing_mass.npy", shares)
    temporary = scratch / "calibration.tmp"
    temporary.write_text(json.dumps({"mean_loss": float(losses.mean())}))
    os.replace(temporary, scratch / "calibration.json")


def _file(scratch: Path, layer: int, matrix: int) -> Path:
    return scratch / f"importance_{layer:03d}_{NAMES[matrix]}.npy"


def _encoder(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _read_text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_CHARS)
    except OSError as error:
        raise UsageError(f"cannot read the calibration text {path}: {error.strerror}") from error
    if not text.strip():
        raise UsageError(f"the calibration text {path} is empty")
    return text

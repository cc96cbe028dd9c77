"""Calibration text to token windows of one length."""

from collections.abc import Callable, Sequence

import numpy as np


def windows(
    texts: Sequence[str] | Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray,
    length: int,
    count: int | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
    bos: int | None = None,
) -> np.ndarray:
    """Windows ``int32[n, length]`` from texts or token sequences; n is at most ``count``.

    Each text is cut into windows that do not overlap (its tail is dropped); where there are more than ``count``, they
    are taken evenly from all of the material, so every text has its share. ``bos`` starts every window if given.
    If no text fills a window, the window shrinks to the longest one. ``encode`` is needed for strings.
    ValueError where there are fewer than two tokens to learn from.
    """
    pieces = [_tokens(text, encode) for text in texts]
    room = length - (bos is not None)
    longest = max((len(p) for p in pieces), default=0)
    room = min(room, longest)
    if room < 2:
        raise ValueError(f"calibration needs at least 2 tokens of text, got {longest}: give more text")
    cut = [piece[: len(piece) // room * room].reshape(-1, room) for piece in pieces]
    rows = np.concatenate(cut)
    if count is not None and len(rows) > count:
        rows = rows[np.arange(count) * len(rows) // count]
    if bos is not None:
        rows = np.concatenate([np.full((len(rows), 1), bos), rows], axis=1)
    return rows.astype(np.int32)


def _tokens(text: str | Sequence[int] | np.ndarray, encode: Callable[[str], Sequence[int]] | None) -> np.ndarray:
    if isinstance(text, str):
        if encode is None:
            raise ValueError("text needs a tokenizer; give one, or give token ids")
        text = encode(text)
    tokens = np.asarray(text)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a sequence of integers, got {tokens.dtype}{list(tokens.shape)}")
    return tokens.astype(np.int64)

"""Calibration text to token windows of one length: sources mixed by weight, rare experts sought out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Candidate windows for each window that is chosen, where the text has them.
POOL = 2
# Tokens that a text needs to be a kind of its own: fewer say little of it, and a hundred files are not a hundred kinds.
LEAST_KIND_TOKENS = 4096


class Windows(NamedTuple):
    """Candidates ``tokens`` int32[n, T] with the number of their ``source`` int64[n], and ``quota`` int64[sources], how
    many windows of each source calibration is to use."""

    tokens: np.ndarray
    source: np.ndarray
    quota: np.ndarray


def windows(
    texts: Sequence[str] | Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray,
    length: int,
    count: int | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
    bos: int | None = None,
    weights: Sequence[float] | None = None,
    pool: int = 1,
) -> Windows:
    """Windows of ``length`` tokens from texts or token sequences, each a source; quotas sum to at most ``count``.

    Each text is cut into windows that do not overlap (its tail is dropped). Quotas follow ``weights`` (None: equal),
    and what a short source lacks the others give. Of each source ``pool`` times its quota are taken, evenly from all
    of it. ``bos`` starts every window if given. If no text fills a window, the window shrinks to the longest one.
    ``encode`` is needed for strings. ValueError where there are fewer than two tokens to learn from, or weights do not
    fit.
    """
    pieces = [_tokens(text, encode) for text in texts]
    shares = np.ones(len(pieces)) if weights is None else np.asarray(weights, float)
    if len(shares) != len(pieces) or not (np.isfinite(shares) & (shares > 0)).all():
        raise ValueError(f"weights must be one positive number for each of the {len(pieces)} texts, got {weights}")
    room = length - (bos is not None)
    longest = max((len(p) for p in pieces), default=0)
    room = min(room, longest)
    if room < 2:
        raise ValueError(f"calibration needs at least 2 tokens of text, got {longest}: give more text")
    cut = [piece[: len(piece) // room * room].reshape(-1, room) for piece in pieces]
    available = np.array([len(rows) for rows in cut])
    quota = share_out(available, shares, available.sum() if count is None else count)
    taken = np.minimum(available, quota * pool)
    rows = np.concatenate([c[np.arange(t) * len(c) // max(t, 1)] for c, t in zip(cut, taken, strict=True)])
    if bos is not None:
        rows = np.concatenate([np.full((len(rows), 1), bos), rows], axis=1)
    return Windows(rows.astype(np.int32), np.repeat(np.arange(len(cut)), taken), quota)


def share_out(available: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """``count`` windows, or all, shared among sources by ``weights``; none gives more than it has: int64[sources]."""
    quota = np.zeros(len(available), np.int64)
    while left := min(count, int(available.sum())) - int(quota.sum()):
        share = weights * (available > quota)
        share = share / share.sum() * left
        more = np.minimum(np.floor(share), available - quota).astype(np.int64)
        if not more.any():
            more[np.argsort(-share, kind="stable")[:left]] = 1
        quota += np.minimum(more, available - quota)
    return quota


def choose(candidates: Windows, counts: np.ndarray) -> np.ndarray:
    """Numbers int64[m], ascending, of the windows to use: each source's quota, seldom seen experts sought.

    ``counts`` [n, ...] are routed tokens of every expert in every candidate. Greedy: the window that adds most to the
    sum of log(1 + tokens), to first order, so an expert that has few tokens pulls most.
    """
    counts = counts.reshape(len(counts), -1).astype(np.float64)
    left, chosen = candidates.quota.copy(), np.zeros(len(counts), bool)
    total = np.zeros(counts.shape[1])
    for _ in range(int(left.sum())):
        gain = counts @ (1 / (1 + total))
        gain[chosen | (left[candidates.source] == 0)] = -1
        best = int(np.argmax(gain))
        chosen[best] = True
        left[candidates.source[best]] -= 1
        total += counts[best]
    return np.flatnonzero(chosen)


def kinds(quota: np.ndarray, length: int) -> np.ndarray:
    """The kind of text of each source, int64[sources], 0 upwards: its own where ``quota`` windows of ``length`` tokens
    are LEAST_KIND_TOKENS or more, one that all others share, the last, where they are fewer."""
    large = quota * length >= LEAST_KIND_TOKENS
    return np.where(large, np.cumsum(large) - 1, large.sum())


def thin(text: str, chars: int, piece: int) -> list[str]:
    """The text in pieces of ``piece`` characters, at most ``chars`` in all: evenly taken where it is longer.

    Pieces are encoded one by one, so that a long text is neither tokenized whole nor held as tokens.
    """
    starts = np.arange(0, len(text), piece)
    most = max(1, chars // piece)
    if len(starts) > most:
        starts = starts[np.arange(most) * len(starts) // most]
    return [text[start : start + piece] for start in starts]


def _tokens(text: str | Sequence[int] | np.ndarray, encode: Callable[[str], Sequence[int]] | None) -> np.ndarray:
    if isinstance(text, str):
        if encode is None:
            raise ValueError("text needs a tokenizer; give one, or give token ids")
        text = encode(text)
    tokens = np.asarray(text)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a sequence of integers, got {tokens.dtype}{list(tokens.shape)}")
    return tokens.astype(np.int64)

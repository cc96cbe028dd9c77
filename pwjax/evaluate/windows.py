"""From text to windows of tokens: what a model sees at once, which tokens count, and how many bytes they stand for.

Windows begin every ``stride`` tokens. A window scores the tokens that no earlier window scored; tokens before them
are context. A token needs something before it to be predicted from, so the first token of a window counts only where
a BOS token stands before it::

    stride = window     |.ssssss|.ssssss|.sss            . context   s scored
    stride < window     |.ssssss|
                            |...ssss|
                                |...sss
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pwjax.engine.text import Tokenizer
from pwjax.errors import UsageError
from pwjax.evaluate.texts import Document


class Tokens(NamedTuple):
    """A tokenized text: ``ids`` int32[n], and ``ends`` int64[n], UTF-8 bytes of the text up to each token's end.

    Bytes between two tokens (spaces that a tokenizer drops) belong to the later one, and a character that is split
    over tokens to its first: every byte up to the last token counts exactly once.
    """

    ids: np.ndarray
    ends: np.ndarray


class Window(NamedTuple):
    """``tokens`` int32[at most the window], BOS included; those from ``first`` on are scored, ``bytes`` of text."""

    tokens: np.ndarray
    first: int
    bytes: int


def tokenize(document: Document, tokenizer: Tokenizer, vocab_size: int) -> Tokens:
    """Tokens of a text without special tokens; UsageError where one is not in the model's vocabulary."""
    encoding = tokenizer.backend.encode(document.text, add_special_tokens=False)
    ids = np.array(encoding.ids, np.int32)
    if ids.size and ids.max() >= vocab_size:
        raise UsageError(
            f"{document.name} has the token id {ids.max()}, but the model's vocabulary ends at {vocab_size - 1}; "
            "the tokenizer belongs to another model"
        )
    code = np.frombuffer(document.text.encode("utf-32-le"), np.uint32)
    size = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    byte_of_char = np.concatenate([[0], np.cumsum(size)])
    ends = byte_of_char[np.array([end for _, end in encoding.offsets], np.int64)]
    return Tokens(ids, np.maximum.accumulate(ends) if ids.size else ends)


def cut(tokens: Tokens, window: int, stride: int, bos: int | None = None) -> Iterator[Window]:
    """Windows of at most ``window`` tokens; with ``bos``, each begins with it and has one token of text less."""
    lead = [] if bos is None else [bos]
    room, count = window - len(lead), len(tokens.ids)
    scored = 0  # text tokens before this one are behind us
    for start in range(0, count, stride):
        end = min(start + room, count)
        begin = max(scored, start + 1 - len(lead))
        if begin < end:
            before = int(tokens.ends[begin - 1]) if begin else 0
            part = np.concatenate([np.array(lead, np.int32), tokens.ids[start:end]])
            yield Window(part, begin - start + len(lead), int(tokens.ends[end - 1]) - before)
        scored = end
        if end == count:
            break


def leading_bos(tokenizer: Tokenizer) -> int | None:
    """The BOS token, where the tokenizer puts it before every text; models are used the way they were trained."""
    ids = tokenizer.backend.encode("", add_special_tokens=True).ids
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


def spread_windows(
    documents: Sequence[Document], tokenizer: Tokenizer, vocab_size: int, tokens: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """About ``tokens`` tokens as whole windows int32[n, length], and the document of each, int64[n].

    Documents get equal shares (a short one what it has), taken evenly over their whole length. A BOS token leads
    where the tokenizer wants one. UsageError, with the names, where no document fills a window.
    """
    bos, share = leading_bos(tokenizer), max(1, tokens // (len(documents) * length))
    room = length - (bos is not None)
    rows, owners = [], []
    for index, document in enumerate(documents):
        # A token is seldom more than 16 characters: there is no need to tokenize a book for a few windows.
        stretch, size = 16 * length, len(document.text)
        if size <= share * stretch:
            ids = tokenize(document, tokenizer, vocab_size).ids
            found = ids[: len(ids) // room * room].reshape(-1, room)
            found = found[np.arange(min(share, len(found))) * len(found) // max(min(share, len(found)), 1)]
        else:
            starts = np.arange(share) * (size - stretch) // max(share - 1, 1)
            parts = [Document(document.name, document.text[s : s + stretch]) for s in starts]
            found = [ids[:room] for ids in (tokenize(p, tokenizer, vocab_size).ids for p in parts) if len(ids) >= room]
        rows += list(found)
        owners += [index] * len(found)
    if not rows:
        names = ", ".join(d.name for d in documents)
        raise UsageError(f"the text is too short: no document ({names}) fills a window of {length} tokens; give more")
    windows = np.array(rows, np.int32)
    if bos is not None:
        windows = np.concatenate([np.full((len(windows), 1), bos, np.int32), windows], axis=1)
    return windows, np.array(owners)

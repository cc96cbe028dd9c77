"""From text to windows of tokens: what a model sees at once, which tokens count, and how many bytes they stand for.

Windows begin every ``stride`` tokens. A window scores the tokens that no earlier window scored; tokens before them
are context. A token needs something before it to be predicted from, so the first token of a window counts only where
a BOS token stands before it::

    stride = window     |.ssssss|.ssssss|.sss            . context   s scored
    stride < window     |.ssssss|
                            |...ssss|
                                |...sss
"""

from collections.abc import Iterator
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

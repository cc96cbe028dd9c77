"""Between text and token ids: the tokenizer, streaming detokenization, and stop strings.

    token ids --Detokenizer--> text that can no longer change --StopMatcher--> text that no stop string can claim

Each stage holds back what later tokens could still change (half a UTF-8 character, the beginning of a stop string)
and releases it at the end, so that the streamed pieces concatenate to the final text exactly.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers

from pwjax.engine.chat import ChatTemplate, Message
from pwjax.errors import CheckpointError, PromptError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A ``tokenizer.json`` with the few operations that generation needs.

    Text that already begins with the token that the tokenizer puts before a text is not given a second.
    ``bos_token_id`` is the model's, if it has one; ``folder`` is where the chat template is, if there is one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None, folder: Path | None = None):
        # A tokenizer.json can carry the truncation and padding of its training run; both would damage prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self._folder = folder
        # The BOS that the tokenizer itself puts before a text; a config.json can name one that it does not use.
        with_bos, without = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
        self._bos = with_bos[0] if with_bos[:1] != without[:1] else None

    @classmethod
    def load(cls, path: str | Path, bos_token_id: int | None = None) -> Self:
        """Read a ``tokenizer.json``, or the one in the directory ``path``; CheckpointError if it cannot be read."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise CheckpointError(f"no tokenizer at {file}; a checkpoint directory must hold a tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), bos_token_id, file.parent)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{file} is not a tokenizer.json that can be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer itself adds, and never two BOS."""
        ids = self._encode(text, add_special_tokens=True)
        if self._bos is not None and ids[:2] == [self._bos] * 2:
            # The text came from a chat template that had written the BOS out.
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of ``text`` with no special tokens added: corpora cut into windows, rendered chat templates."""
        return self._encode(text, add_special_tokens=False)

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """What asks for an answer to ``messages``, for :meth:`encode_plain`; PromptError if there is no template."""
        if self.chat is None:
            raise PromptError("this model has no chat template; give a prompt instead of messages")
        return self.chat.render(messages)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The model's chat template, read when it is first used."""
        return None if self._folder is None else ChatTemplate.load(self._folder)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the backend would only say that this is no str
            raise PromptError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


class Detokenizer:
    """Turns a growing list of token ids into text, piece by piece.

    A piece ends at a character border: a character split over tokens comes out whole with its last token. Only a
    short window is decoded a token, so the cost does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Text of ids[:read] is out. The window starts at an older border, since decoders treat the first token of
        # a text differently (a leading space, for instance).
        self._window = 0
        self._read = 0
        self._length = 0

    def push(self, token_id: int) -> str:
        """Text that became final with this token; often ``""``."""
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._window : self._read])
        now = self._tokenizer.decode(self._ids[self._window :])
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        self._length += len(now) - len(before)
        return now[len(before) :]

    def finish(self) -> str:
        """The rest of the text; bytes of a character that never came to its end show as U+FFFD."""
        rest = self._tokenizer.decode(self._ids)[self._length :]
        self._length += len(rest)
        self._window = self._read = len(self._ids)
        return rest


class StopMatcher:
    """Passes text through up to the first stop string, which it never lets out, not even in parts.

    The stop string that is complete first wins, the longest if several end together; so how the text was cut into
    pieces does not matter.
    """

    def __init__(self, stops: Iterable[str]):
        self.stops = tuple(stops)
        if not all(self.stops):
            raise ValueError("a stop string must not be empty")
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show now. Once ``matched`` is set there is no more."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Text that was held back for a stop string that did not come."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` could begin."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """Detokenizer and stop strings of one request: token ids in, text to show out, ``text`` is all of it so far."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()):
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; later tokens add nothing."""
        return self._matcher.matched is not None

    def push(self, token_id: int) -> str:
        """Text that this token lets out; check ``stopped`` afterwards."""
        return self._out(self._matcher.push(self._detokenizer.push(token_id)))

    def finish(self) -> str:
        """The last piece, when no more tokens come."""
        # A character that stayed incomplete can still complete a stop string (one that holds U+FFFD, or a byte's text).
        last = self._matcher.push(self._detokenizer.finish())
        return self._out(last + self._matcher.finish())

    def _out(self, piece: str) -> str:
        self.text += piece
        return piece

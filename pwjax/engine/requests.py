"""Requests: what is asked of the engine, and the JSONL form in which a job hands them over.

A line is a JSON string (the prompt) or an object::

    {"id": "a7", "prompt": "Once upon", "max_tokens": 64, "temperature": 0.7, "stop": ["\\n\\n"]}
    {"prompt_token_ids": [5, 19, 7]}
    {"messages": [{"role": "user", "content": "Hello"}]}

Keys: ``id``, one of ``prompt``, ``prompt_token_ids`` and ``messages``, the demands ``min_bits`` and ``max_damage``,
and the fields of SamplingParams. An id is a string or a whole number; a line without one gets its 0-based line number,
counted over all lines so that a skipped line moves nobody else's id. Ids are unique as text: 7 and "7" are the same,
since a resumed job finds its finished requests by id.
"""

import hashlib
import json
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from pwjax.engine.chat import Message, checked_messages
from pwjax.engine.sampling import MAX_SEED, SamplingParams
from pwjax.engine.text import Tokenizer
from pwjax.errors import PromptError, PWJaxError, UsageError


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    One of ``prompt``, ``prompt_token_ids`` and ``messages`` is set when it comes in; ``rendered`` turns messages into
    the prompt of the model's chat template, ``tokenized`` fills in the ids. ``min_bits`` is a floor on every block
    while the request runs, ``max_damage`` bounds the predicted damage a token (see :mod:`pwjax.engine.quality`).
    ``score``: nothing is generated, the log-probabilities of the prompt's own tokens are wanted.
    ``prompt_token_ids`` may be any sequence or array of whole numbers.
    Raises PromptError for an empty prompt or a demand that makes no sense.
    """

    id: str | int
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    messages: tuple[Message, ...] | None = None
    min_bits: int | None = None
    max_damage: float | None = None
    score: bool = False

    def __post_init__(self):
        whole = isinstance(self.id, Integral) and not isinstance(self.id, bool)
        if not whole and not (isinstance(self.id, str) and self.id):
            raise PromptError(f"id must be a non-empty string or a whole number, got {self.id!r:.80}")
        if whole:
            object.__setattr__(self, "id", int(self.id))
        if self.min_bits is not None and (type(self.min_bits) is not int or not 2 <= self.min_bits <= 16):
            raise PromptError(f"min_bits must be a whole number from 2 to 16, got {self.min_bits!r}")
        limit = self.max_damage
        if limit is not None and (type(limit) not in (int, float) or not 0 <= limit < inf):
            raise PromptError(f"max_damage must be a finite number of at least 0, got {limit!r}")
        if not isinstance(self.sampling, SamplingParams):
            raise PromptError(f"sampling must be pwjax.SamplingParams(...), got {self.sampling!r}")
        if self.prompt_token_ids is not None:
            object.__setattr__(self, "prompt_token_ids", _whole_ids(self.prompt_token_ids))
        if self.messages is not None:
            object.__setattr__(self, "messages", checked_messages(self.messages))
        elif self.prompt is None and self.prompt_token_ids is None:
            raise PromptError("a request needs a prompt, prompt_token_ids or messages")
        if self.prompt == "" and not self.prompt_token_ids:
            raise PromptError("the prompt is empty; give at least one character")
        if self.prompt_token_ids is not None and not self.prompt_token_ids:
            raise PromptError("prompt_token_ids is empty; give at least one token id")

    @property
    def key(self) -> str:
        """The id as text: what makes it unique."""
        return str(self.id)

    def rendered(self, tokenizer: Tokenizer) -> Self:
        """A copy whose ``prompt`` is the chat template's text, where there are messages; PromptError without one."""
        if self.messages is None or self.prompt is not None:
            return self
        return replace(self, prompt=tokenizer.chat_prompt(self.messages))

    def tokenized(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        """A copy with ``prompt_token_ids``; PromptError if an id is outside ``vocab_size`` or nothing is left."""
        ids, request = self.prompt_token_ids, self
        if ids is None:
            request = self.rendered(tokenizer)
            assert request.prompt is not None
            # A template writes the special tokens itself.
            ids = tuple((tokenizer.encode if self.messages is None else tokenizer.encode_plain)(request.prompt))
            if not ids:
                raise PromptError("the prompt has no tokens; give at least one character that the tokenizer keeps")
        check_token_ids("prompt_token_ids", ids, vocab_size)
        check_token_ids("stop_token_ids", self.sampling.stop_token_ids, vocab_size)
        return replace(request, prompt_token_ids=ids)


def as_requests(
    prompts: str | Request | Iterable[str | Request], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[Request]:
    """Requests of what :meth:`Engine.generate` takes; ids of plain prompts are their index. PromptError, UsageError."""
    items = _items(prompts)
    for index, item in enumerate(items):
        if not isinstance(item, str | Request):
            raise PromptError(
                f"prompt {index} is {type(item).__name__}; give a string, or pwjax.Request(id, "
                "prompt_token_ids=(...)) for token ids"
            )
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * len(items)
    if not isinstance(sampling, Sequence):
        raise PromptError(f"sampling must be pwjax.SamplingParams(...), or a list of them, got {sampling!r}")
    if len(sampling) != len(items):
        raise PromptError(f"{len(items)} prompts need as many sampling parameters, got {len(sampling)}")
    requests = [
        item if isinstance(item, Request) else Request(index, item, None, params)
        for index, (item, params) in enumerate(zip(items, sampling, strict=True))
    ]
    keys = [r.key for r in requests]
    if len(set(keys)) < len(keys):
        raise PromptError("two prompts have the same id; ids must be unique")
    return requests


def as_scored(texts: str | Sequence[int] | Request | Iterable[str | Sequence[int] | Request]) -> list[Request]:
    """Requests of what :meth:`Engine.score` takes, ids after their index. PromptError."""
    items = _items(texts)
    if items and not isinstance(texts, Integral) and all(isinstance(item, Integral) for item in items):
        items = [items]
    requests = []
    for index, item in enumerate(items):
        name = f"score {index}"  # whatever ids others have
        if isinstance(item, bytes | Mapping):
            raise PromptError(f"text {index} is {type(item).__name__}; give a string, token ids, or pwjax.Request")
        if isinstance(item, Request):
            requests.append(replace(item, id=name, score=True))
        elif isinstance(item, str):
            requests.append(Request(name, item, score=True))
        else:
            requests.append(Request(name, None, item, score=True))
    return requests


def _items(given: Any) -> list[Any]:
    """What was given one by one, or the one that was given; a mapping is a job's line, its keys are no prompts."""
    one = not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping)
    return [given] if one else list(given)


def _whole_ids(ids: Any) -> tuple[int, ...]:
    """Token ids as Python's own integers, which the log can hold; PromptError for what is no list of whole numbers."""
    try:
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise PromptError(f"prompt_token_ids must be a list of whole numbers, got {ids!r:.80}") from None


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise PromptError for the first id that is outside ``0..vocab_size-1``."""
    for at, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise PromptError(f"{name}[{at}] is {token}; this model's token ids are 0 to {vocab_size - 1}")


def request_seed(run_seed: int, request_id: str | int) -> int:
    """The seed of a request that names none: a function of the run's seed and the id, never of the order."""
    digest = hashlib.sha256(f"{run_seed}\0{request_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & MAX_SEED


def read_requests(
    source: str | Path,
    defaults: SamplingParams | None = None,
    *,
    vocab_size: int | None = None,
    skip_bad_lines: bool = False,
    stdin: BinaryIO | None = None,
    report: TextIO | None = None,
) -> list[Request]:
    """Read the requests of a JSONL file, or of standard input if ``source`` is ``-``.

    ``defaults`` are the sampling parameters of a line that sets none, but for its seed: a line without one gets
    ``request_seed(defaults.seed or 0, id)``. With ``vocab_size``, token ids are checked. A bad line raises PromptError
    with its 1-based number; with ``skip_bad_lines`` it is left out and counted on ``report`` (default: standard
    error). UsageError if the file cannot be read, PromptError if it holds no request.
    """
    name, data = _read(source, stdin)
    return parse_requests(
        data.split(b"\n"), name, defaults or SamplingParams(), vocab_size=vocab_size, skip_bad_lines=skip_bad_lines,
        report=sys.stderr if report is None else report,
    )


def parse_requests(
    lines: Iterable[bytes],
    name: str,
    defaults: SamplingParams,
    *,
    vocab_size: int | None,
    skip_bad_lines: bool,
    report: TextIO,
) -> list[Request]:
    """``read_requests`` on lines that are already in memory; ``name`` is what errors call the file."""
    requests: list[Request] = []
    seen: dict[str, int] = {}
    bad = 0
    for index, line in enumerate(lines):
        line = line.strip()
        if not line:
            continue
        try:
            request = _parse(line, index, defaults, vocab_size)
            if request.key in seen:
                raise PromptError(
                    f"the id {request.id!r} is already that of line {seen[request.key]}; "
                    "ids must be unique, since finished requests are found by them"
                )
        except PWJaxError as error:
            message = f"{name}, line {index + 1}: {error}"
            if not skip_bad_lines:
                hint = "Correct the line, or leave such lines out with --skip-bad-lines"
                raise PromptError(f"{message}. {hint}") from error
            bad += 1
            print(f"skipped {message}", file=report)
            continue
        seen[request.key] = index + 1
        requests.append(request)
    if bad:
        print(f"skipped {bad} bad line{'s' * (bad > 1)} of {name}, {len(requests)} left", file=report)
    if not requests:
        raise PromptError(f"{name} holds no request; give one JSON string or object a line")
    return requests


_KEYS = ("id", "prompt", "prompt_token_ids", "messages", "min_bits", "max_damage", *SamplingParams.field_names())


def _parse(line: bytes, index: int, defaults: SamplingParams, vocab_size: int | None) -> Request:
    try:
        value = json.loads(line.decode("utf-8-sig" if index == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
        raise PromptError(f"not a request: {error}") from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise PromptError(f"a line must be a JSON string or object, got {_kind(value)}")
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise PromptError(f"unknown key {', '.join(map(repr, unknown))}; allowed are {', '.join(_KEYS)}")
    request_id = value.pop("id", index)
    if isinstance(request_id, bool) or not isinstance(request_id, str | int) or request_id == "":
        raise PromptError(f"id must be a non-empty string or a whole number, got {json.dumps(request_id)}")
    prompt, ids, messages = (value.pop(key, None) for key in ("prompt", "prompt_token_ids", "messages"))
    if sum(one is not None for one in (prompt, ids, messages)) != 1:
        raise PromptError("give exactly one of prompt, prompt_token_ids and messages")
    min_bits: Any = value.pop("min_bits", None)
    max_damage: Any = value.pop("max_damage", None)
    if isinstance(request_id, str):
        _check_text("id", request_id)
    if prompt is not None:
        _check_text("prompt", prompt)
    if ids is not None and (not isinstance(ids, list) or any(type(i) is not int for i in ids)):
        raise PromptError("prompt_token_ids must be a list of whole numbers")
    # null means the default, for programs that write every key; only logprobs has a null of its own.
    given = {key: v for key, v in value.items() if v is not None or key == "logprobs"}
    sampling = defaults.with_fields(**{"seed": request_seed(defaults.seed or 0, request_id), **given})
    talk = None if messages is None else checked_messages(messages)
    request = Request(request_id, prompt, None if ids is None else tuple(ids), sampling, talk, min_bits, max_damage)
    if vocab_size is not None:
        check_token_ids("prompt_token_ids", request.prompt_token_ids or (), vocab_size)
        check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    return request


def _check_text(name: str, text) -> None:
    if not isinstance(text, str):
        raise PromptError(f"{name} must be a string, got {_kind(text)}; token ids go into prompt_token_ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} is not valid Unicode: {error.reason} at character {error.start}") from error


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _read(source: str | Path, stdin: BinaryIO | None) -> tuple[str, bytes]:
    if str(source) == "-":
        return "standard input", (sys.stdin.buffer if stdin is None else stdin).read()
    path = Path(source)
    try:
        return str(path), path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the prompts file {path}: {error.strerror}") from error

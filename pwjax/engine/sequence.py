"""One running request: its tokens, what of them is in KV pages, its text, and how it ended."""

from dataclasses import dataclass, field

from pwjax.engine.requests import Request
from pwjax.engine.shadow import chosen
from pwjax.engine.text import TextStream, Tokenizer
from pwjax.memory import Prefix


@dataclass(frozen=True)
class Completion:
    """A finished request, in the form that ``generate --json`` prints.

    ``finish_reason`` is ``stop`` (end of sequence, stop token or stop string), ``length`` (``max_tokens`` or the
    context), or ``refused`` (``error`` says why; a request that had begun keeps what it had). ``token_ids`` are all
    generated tokens, the one that stopped it included. ``logprobs``, if asked for, has one entry a token:
    ``{"token_id", "logprob", "top": [[id, logprob]]}``. A scored request ends with ``score`` and has ``scores``, and
    ``greedy``: whether each token was the likeliest.
    """

    id: str | int
    prompt: str | None
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    logprobs: list[dict] | None = None
    error: str | None = None
    scores: list[float] | None = None
    greedy: list[bool] | None = None

    def to_json(self) -> dict:
        """Plain dictionary; ``logprobs`` and ``error`` only where there are any."""
        data = dict(self.__dict__)
        for optional in ("logprobs", "error", "scores", "greedy"):
            if data[optional] is None:
                del data[optional]
        return data


@dataclass(frozen=True)
class Piece:
    """Text of a running request that became final; may be empty with the last token."""

    id: str | int
    text: str


@dataclass
class Sequence:
    """A request in a slot, or waiting for one.

    ``kv_tokens`` leading tokens are in pages. The newest generated token never is: a decode step feeds it. After a
    preemption ``kv_tokens`` is 0 and everything but the newest token goes through prefill again. ``prefix`` is the last
    chunk that it shares or lets others share, the root of the trie before the first; None where it does neither.
    ``shadow``: of a ``shadow_share`` of its tokens, ``[index, predicted damage, ids, log-probabilities]``.
    """

    request: Request
    order: int
    prompt: tuple[int, ...]
    max_total: int
    stream: TextStream
    seed: int
    slot: int = -1
    kv_tokens: int = 0
    prefix: Prefix | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[dict] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    shadow_share: float = 0.0
    shadow: list[list] = field(default_factory=list)
    finish_reason: str | None = None

    @classmethod
    def start(
        cls, request: Request, order: int, context: int, tokenizer: Tokenizer | None, seed: int
    ) -> "Sequence":
        """State of a request that has just been accepted; ``context`` bounds prompt plus new tokens."""
        prompt = request.prompt_token_ids
        assert prompt is not None
        stream = TextStream(tokenizer, request.sampling.stop) if tokenizer else _NoText()
        new = 0 if request.score else request.sampling.max_tokens
        max_total = min(context, len(prompt) + new)
        return cls(request, order, prompt, max_total, stream, seed)  # pyright: ignore[reportArgumentType]

    @property
    def prefill_target(self) -> int:
        """Tokens that must be in pages before decoding goes on."""
        return len(self.prompt) + max(0, len(self.generated) - 1)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens (or tokens lost to a preemption) are still to be processed."""
        return self.kv_tokens < self.prefill_target or not self.generated

    @property
    def left(self) -> int:
        """New tokens that may still come."""
        return self.max_total - len(self.prompt) - len(self.generated)

    def shadowed(self, ahead: int = 0) -> bool:
        """Whether the shadow sample has the next token, or the one ``ahead`` of it."""
        return chosen(self.order, len(self.generated) + ahead, self.shadow_share)

    def tokens(self, start: int, count: int) -> list[int]:
        """Up to ``count`` tokens of prompt and generated text from position ``start``."""
        return [*self.prompt, *self.generated][start : start + count]

    def push(self, token: int, eos: tuple[int, ...]) -> str:
        """Take a generated token; returns text that became final and sets ``finish_reason`` where it ends."""
        sampling = self.request.sampling
        self.generated.append(token)
        if token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos):
            self.finish_reason = "stop"
            return self.stream.finish()
        text = self.stream.push(token)
        if self.stream.stopped:
            self.finish_reason = "stop"
        elif self.left <= 0:
            self.finish_reason = "length"
            text += self.stream.finish()
            # The last bytes of the text can complete a stop string that was still open.
            if self.stream.stopped:
                self.finish_reason = "stop"
        return text

    def submitted(self) -> dict:
        """What a replay needs to submit it again; the seed is the one in force, also where the request named none."""
        request = self.request
        sampling = {name: getattr(request.sampling, name) for name in request.sampling.field_names()}
        rest = {name: getattr(request, name) for name in ("min_bits", "max_damage", "score")}
        return {
            "id": request.id, "order": self.order, "prompt_token_ids": list(self.prompt),
            "sampling": {**sampling, "seed": self.seed},
            **{name: value for name, value in rest.items() if value not in (None, False)},
        }  # fmt: skip

    def ended(self, reason: str | None) -> dict:
        """What the log says of its end."""
        start = {"id": self.request.id, "order": self.order, "reason": reason, "prompt_tokens": len(self.prompt)}
        shadow = {"shadow": self.shadow} if self.shadow else {}
        return {**start, "token_ids": list(self.generated), **shadow}

    def completion(self) -> Completion:
        """The finished request; a sequence cut short from outside counts as ``length``."""
        return Completion(
            id=self.request.id,
            prompt=self.request.prompt,
            text=self.stream.text,
            token_ids=list(self.generated),
            finish_reason=self.finish_reason or "length",
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self.generated),
            logprobs=self.logprobs if self.request.sampling.logprobs is not None else None,
            scores=self.scores if self.request.score else None,
            greedy=self.greedy if self.request.score else None,
        )


class _NoText:
    """Stands in for the text of a model without a tokenizer."""

    text, stopped = "", False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def refused(request: Request, reason: str) -> Completion:
    """Completion of a request that was never started."""
    tokens = len(request.prompt_token_ids or ())
    return Completion(request.id, request.prompt, "", [], "refused", tokens, 0, None, reason)

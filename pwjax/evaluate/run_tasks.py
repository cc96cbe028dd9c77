"""Items through an engine: prompts continued greedily, pairs compared by likelihood, a record each, and the summary."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pwjax.engine.engine import Engine
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.engine.sequence import Completion
from pwjax.engine.text import Tokenizer
from pwjax.errors import UsageError
from pwjax.evaluate.tasks import Item
from pwjax.evaluate.windows import leading_bos

GOOD, BAD = "good", "bad"


def run_items(
    engine: Engine, items: Sequence[Item], chat: bool = False, stopped: Callable[[], bool] = lambda: False
) -> Iterator[dict]:
    """A record of each item as it is done, JSON-ready; ends early, between two steps, once ``stopped()``.

    ``{"id", "task", "scores", "prediction" or "logprobs", "answers", "prompt_tokens", "finish_reason", ...}``. Prompts
    that are too long lose their middle, as LongBench cuts them. UsageError without a tokenizer.
    """
    if engine.tokenizer is None:
        raise UsageError("tasks are text, and this model has no tokenizer.json")
    for item in items:
        # A package that is missing, or an answer in no form that the metric takes, shows before hours of work.
        item.scores("")
    for item in items:
        for request in _requests(item, engine, chat):
            engine.submit(request)
    known, halves = {item.id: item for item in items}, {}
    while not (engine.idle or stopped()):
        for event in engine.step():
            if not isinstance(event, Completion):
                continue
            key, _, side = str(event.id).rpartition("#")
            item = known[key]
            if item.pair is None:
                yield _record(item, event)
                continue
            pair = halves.setdefault(key, {})
            pair[side] = event
            if len(pair) == 2:
                yield _compared(item, halves.pop(key))


def _requests(item: Item, engine: Engine, chat: bool) -> list[Request]:
    tokenizer, context = engine.tokenizer, engine.parts.shapes.context
    assert tokenizer is not None
    if item.pair is not None:
        first = _first_token(tokenizer, engine)
        return [
            Request(f"{item.id}#{side}", None, (*first, *tokenizer.encode_plain(text)), score=True)
            for side, text in zip((GOOD, BAD), item.pair, strict=True)
        ]
    new = min(item.max_tokens, context // 2)
    if chat and item.chat:
        ids = tokenizer.encode_plain(tokenizer.chat_prompt(({"role": "user", "content": item.prompt},)))
    else:
        ids = tokenizer.encode(item.prompt)
    sampling = SamplingParams(max_tokens=new, temperature=0, stop=item.stop)
    return [Request(f"{item.id}#", item.prompt, tuple(middle_cut(ids, context - new)), sampling)]


def _first_token(tokenizer: Tokenizer, engine: Engine) -> tuple[int, ...]:
    """What the first token of a sentence is predicted from: BOS where the tokenizer uses it, else the end of a text."""
    bos, eos = leading_bos(tokenizer), engine.config.eos_token_ids
    return (bos,) if bos is not None else eos[:1]


def middle_cut(ids: Sequence[int], room: int) -> list[int]:
    """At most ``room`` tokens: the first half of them and the last, where ``ids`` has more."""
    half = room // 2
    return list(ids) if len(ids) <= room else [*ids[:half], *ids[len(ids) - (room - half) :]]


def _record(item: Item, done: Completion) -> dict:
    refused = done.finish_reason == "refused"
    return {
        "id": item.id,
        "task": item.task,
        "scores": {} if refused else item.scores(done.text),
        "prediction": done.text,
        "answers": list(item.answers),
        "prompt_tokens": done.prompt_tokens,
        "generated_tokens": done.generated_tokens,
        "finish_reason": done.finish_reason,
        **({"error": done.error} if refused else {}),
        **({"details": item.details} if item.details else {}),
    }


def _compared(item: Item, pair: dict[str, Completion]) -> dict:
    sides = [pair[GOOD], pair[BAD]]
    failed = next((side for side in sides if side.scores is None), None)
    sums = [float(np.sum(side.scores or [0.0])) for side in sides]
    return {
        "id": item.id,
        "task": item.task,
        "scores": {} if failed else {"accuracy": float(sums[0] > sums[1])},
        "logprobs": sums,
        "prompt_tokens": sum(side.prompt_tokens for side in sides),
        "finish_reason": failed.finish_reason if failed else "score",
        **({"error": failed.error} if failed else {}),
    }


def summarize(records: Iterable[dict]) -> dict:
    """By task: ``{"items", "refused", "metrics": {name: {"mean", "stderr"}}}``, and ``all`` where tasks share metrics.

    ``all`` is the mean over items of all tasks, as of BLiMP's 67. The standard error is None for one item.
    """
    tasks: dict[str, list[dict]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    found = {task: _summary(own) for task, own in sorted(tasks.items())}
    together = _summary([record for own in tasks.values() for record in own])
    shared = all(one["metrics"].keys() == together["metrics"].keys() for one in found.values())
    return found | ({"all": together} if len(found) > 1 and shared else {})


def _summary(records: list[dict]) -> dict:
    samples: dict[str, list[float]] = {}
    for record in records:
        for name, score in record["scores"].items():
            samples.setdefault(name, []).append(score)
    return {
        "items": len(records),
        "refused": sum(record["finish_reason"] == "refused" for record in records),
        "metrics": {name: _mean(values) for name, values in samples.items()},
    }


def _mean(values: list[float]) -> dict:
    count = len(values)
    error = float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else None
    return {"mean": float(np.mean(values)), "stderr": error}

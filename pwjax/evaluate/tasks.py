"""Tasks on local files: rows of known layouts become items, an item a prompt or two sentences, and a metric.

A row's keys tell its layout, so files are taken as they are published (JSONL, plain or ``.gz``):

    LongBench       input, context, answers, dataset, all_classes, _id
    KV retrieval    ordered_kv_records, key, value              lost-in-the-middle
    GSM8K           question, answer                            the answer ends in ``#### number``
    minimal pairs   good, bad, task   or   sentence_good, sentence_bad, UID (BLiMP)
    needle          context, needle, question, answer           :func:`needle_rows` makes them of any text
"""

import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path

import numpy as np

from pwjax.engine.text import Tokenizer
from pwjax.errors import UsageError
from pwjax.evaluate import metrics

# Of LongBench, those whose answer is one line, and those that no chat template goes around.
ONE_LINE = ("trec", "triviaqa", "samsum", "lsht")
PLAIN = (*ONE_LINE, "lcc", "repobench-p")
GSM8K_MAX_TOKENS = 320


@dataclass(frozen=True)
class Item:
    """One example. ``prompt`` to continue with at most ``max_tokens``, greedily, until one of ``stop``; or ``pair``,
    a good and a bad sentence whose likelihoods are compared.

    ``answers``: any of them is right, the best counts. ``chat``: a chat template may go around the prompt.
    ``details``: what results may be grouped by.
    """

    id: str
    task: str
    prompt: str = ""
    max_tokens: int = 0
    answers: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    pair: tuple[str, str] | None = None
    classes: tuple[str, ...] = ()
    chat: bool = True
    metrics: tuple[str, ...] = ()
    details: dict = field(default_factory=dict)

    def scores(self, prediction: str) -> dict[str, float]:
        """Every metric of the item's task: the best over the answers; none of a pair. UsageError."""
        if self.task in ONE_LINE:
            prediction = prediction.lstrip("\n").split("\n")[0]
        found = {}
        for name in self.metrics:
            metric = _METRICS.get(name) or partial(metrics.classification, classes=self.classes)
            found[name] = max((metric(prediction, answer) for answer in self.answers), default=0.0)
        return found


# All but classification, which needs the names of the classes.
_METRICS: dict[str, Callable[[str, str], float]] = {
    "qa_f1": metrics.qa_f1, "qa_f1_zh": metrics.qa_f1_zh, "retrieval": metrics.retrieval,
    "count": metrics.numbers_right, "rouge_zh": metrics.rouge_zh,
    "code_similarity": metrics.code_similarity, "contains": metrics.contains, "begins": metrics.begins,
    "strict": metrics.gsm8k_strict, "flexible": metrics.gsm8k_flexible,
    **{kind: partial(metrics.rouge, kind=kind) for kind in metrics.ROUGE},
}  # fmt: skip


def read_items(path: str | os.PathLike, limit: int | None = None, shots: Sequence[Mapping] = ()) -> list[Item]:
    """The items of a file, the first ``limit`` of them; ``shots``: GSM8K rows in front of each question.

    UsageError, with file and line, for what is no row of a known layout.
    """
    name = Path(path).name.removesuffix(".gz").removesuffix(".jsonl")
    return [_item(row, name, number, f"{path}, line {number + 1}", shots) for number, row in read_rows(path, limit)]


def read_rows(path: str | os.PathLike, limit: int | None = None) -> list[tuple[int, dict]]:
    """``(line, object)`` of a JSONL file, lines counted from 0; UsageError that names the line for anything else."""
    rows = []
    try:
        opened = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file):
                if limit is not None and len(rows) >= limit:
                    break
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise UsageError(f"{path}, line {number + 1}: a row is an object")
                    rows.append((number, row))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the task file {path}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line {number + 1}: not JSON") from error
    if not rows:
        raise UsageError(f"the task file {path} holds no row")
    return rows


def read_shots(path: str | os.PathLike, count: int) -> list[dict]:
    """The first ``count`` GSM8K rows of a file, for ``shots`` of :func:`read_items`; UsageError for others or fewer."""
    rows = read_rows(path, count)
    for number, row in rows:
        if not all(isinstance(row.get(key), str) for key in ("question", "answer")):
            raise UsageError(f"{path}, line {number + 1}: a solved question has question and answer, both text")
    if len(rows) < count:
        raise UsageError(f"{path} has {len(rows)} solved questions, {count} are asked for")
    return [row for _, row in rows]


def needle_rows(text: str, tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> list[dict]:
    """``count`` rows of the needle layout: a five-digit code in ``length`` tokens of ``text``, depths evenly spread.

    UsageError where the text is shorter.
    """
    rng, ids = np.random.default_rng(seed), tokenizer.encode_plain(text)
    if len(ids) < length:
        raise UsageError(f"the text has {len(ids)} tokens, a needle test of {length} needs as many; give more text")
    rows = []
    for i in range(count):
        start, code = int(rng.integers(0, len(ids) - length + 1)), str(rng.integers(10_000, 100_000))
        depth = i / max(count - 1, 1)
        part, needle = ids[start : start + length], f"The secret code is {code}."
        middle = int(depth * length)
        before, after = tokenizer.decode(part[:middle]), tokenizer.decode(part[middle:])
        # In front of a sentence, where one begins nearby.
        border = before.rfind(". ") + 2 if ". " in before else len(before)
        context = f"{before[:border]}{needle} {before[border:]}{after}".strip()
        rows.append({"context": context, "needle": needle, "question": "What is the secret code?", "answer": code,
                     "depth": depth, "tokens": length})  # fmt: skip
    return rows


def needle_items(text: str, tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> list[Item]:
    """Items of :func:`needle_rows`."""
    rows = needle_rows(text, tokenizer, length, count, seed)
    return [_item(row, f"needle-{length}", number, "needle", ()) for number, row in enumerate(rows)]


def _item(row: dict, name: str, number: int, where: str, shots: Sequence[Mapping]) -> Item:
    """The item of a row; ``number`` stands in where a row has no id."""
    for keys, make in _LAYOUTS:
        if set(keys) <= set(row):
            lists = ("answers", "ordered_kv_records")
            wrong = [k for k in keys if not isinstance(row[k], str | list if k in lists else str)]
            if wrong:
                raise UsageError(f"{where}: {wrong[0]} must be text, got {json.dumps(row[wrong[0]])[:40]}")
            return make(row, name, f"{name}/{row.get('_id', number)}", where, shots)
    known = "; ".join(" and ".join(keys) for keys, _ in _LAYOUTS)
    raise UsageError(f"{where}: no known layout; a row has one of these sets of keys: {known}")


def _longbench(row: dict, name: str, key: str, where: str, _shots) -> Item:
    dataset = str(row["dataset"])
    # Sets of one kind differ in a number: passage_retrieval_nq10 has ten paragraphs.
    known = longbench()
    task = known.get(dataset) or known.get(dataset.rstrip("0123456789"))
    if task is None:
        raise UsageError(f"{where}: unknown LongBench dataset {dataset!r}; known are {', '.join(known)}")
    prompt = task["prompt"].replace("{context}", str(row["context"])).replace("{input}", str(row["input"]))
    return Item(
        key, dataset, prompt, task["max_tokens"], _texts(row["answers"]), classes=_texts(row.get("all_classes")),
        chat=dataset not in PLAIN, metrics=tuple(task["metrics"]),
    )  # fmt: skip


def _kv_retrieval(row: dict, _name: str, key: str, where: str, _shots) -> Item:
    try:
        records = ",\n ".join(f'"{k}": "{v}"' for k, v in row["ordered_kv_records"])
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: ordered_kv_records must be pairs of texts") from error
    prompt = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f'JSON data:\n{{{records}}}\n\nKey: "{row["key"]}"\nCorresponding value:'
    )
    details = {"keys": len(row["ordered_kv_records"])}
    return Item(
        key, "kv_retrieval", prompt, 100, (row["value"],), ("\n",), metrics=("contains",), details=details
    )


def _gsm8k(row: dict, _name: str, key: str, _where: str, shots) -> Item:
    told = [f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots]
    prompt = f"{''.join(told)}Question: {row['question']}\nAnswer:"
    return Item(
        key, "gsm8k", prompt, GSM8K_MAX_TOKENS, (row["answer"],), ("Question:", "\n\n"), chat=not shots,
        metrics=("strict", "flexible"),
    )  # fmt: skip


def _pair(row: dict, name: str, key: str, _where: str, _shots) -> Item:
    good, bad = (str(row.get(k, row.get(f"sentence_{k}"))) for k in ("good", "bad"))
    return Item(key, str(row.get("task", row.get("UID", name))), pair=(good, bad))


def _needle(row: dict, _name: str, key: str, _where: str, _shots) -> Item:
    begun = row["needle"].split(row["answer"])[0]
    prompt = f"{row['context']}\n\nQuestion: {row['question']}\nAnswer: {begun}".rstrip()
    details = {k: row[k] for k in ("depth", "tokens") if k in row}
    return Item(
        key, "needle", prompt, 16, (row["answer"],), ("\n",), chat=False, metrics=("begins", "contains"),
        details=details,
    )  # fmt: skip


_LAYOUTS: tuple[tuple[tuple[str, ...], Callable[..., Item]], ...] = (
    (("input", "context", "answers", "dataset"), _longbench),
    (("ordered_kv_records", "key", "value"), _kv_retrieval),
    (("context", "needle", "question", "answer"), _needle),
    (("question", "answer"), _gsm8k),
    (("good", "bad"), _pair),
    (("sentence_good", "sentence_bad"), _pair),
)


def _texts(value) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else () if value is None else (str(value),)


@lru_cache(maxsize=1)
def longbench() -> dict[str, dict]:
    """``prompt``, ``max_tokens`` of an answer and ``metrics`` of LongBench's datasets, by name."""
    return json.loads((resources.files("pwjax") / "data" / "longbench.json").read_text("utf-8"))["tasks"]

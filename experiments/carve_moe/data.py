"""Training windows and evaluation texts as token ids. Training reads ``*.train.*`` files only."""

import gzip
import json
import re
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import Tokenizer

from experiments.texts import encode, read

TRAIN = {"prose": "books/books.train.txt", "code": "code/python_stdlib.train.txt"}
CHATS = "math/gsm8k.train.jsonl"
PARAGRAPHS = "longctx/nq-open-oracle.jsonl.gz"
# Share of training windows drawn from each source; `chat` is GSM8K's train split as conversations, `facts` are
# paragraphs of an encyclopedia.
MIXTURE = {"prose": 0.3, "code": 0.15, "chat": 0.2, "facts": 0.35}
EVALUATION = {
    "wikitext2.test.detok": "wikitext2/wikitext2.test.detok.txt",
    "books.heldout": "books/books.heldout.txt",
    "python_stdlib.heldout": "code/python_stdlib.heldout.txt",
    "gsm8k.test": "math/gsm8k.test.txt",
}
# A paragraph that shares so many words in a row with text that is evaluated on is not trained on.
SHARED_WORDS = 8
# Pieces of each text, evenly spread, that are encoded for training, and their characters: more than a run sees.
PIECES, PIECE_CHARS = 100, 25_000


def excerpts(text: str) -> str:
    """``PIECES`` pieces from all over a text, which begins with a few of its many books or modules."""
    starts = np.linspace(0, max(0, len(text) - PIECE_CHARS), PIECES).astype(int)
    return text if len(text) <= PIECES * PIECE_CHARS else "".join(text[s : s + PIECE_CHARS] for s in starts)


def conversations(path: Path, template: str) -> str:
    """GSM8K lines ``question``, ``answer`` in the chat ``template`` (Jinja), one conversation after the other."""
    chat = jinja2.Environment().from_string(template)
    lines = [json.loads(line) for line in read(path).splitlines() if line]
    turns = [
        [{"role": "user", "content": line["question"]}, {"role": "assistant", "content": line["answer"]}]
        for line in lines
    ]
    return "".join(chat.render(messages=messages, add_generation_prompt=False) for messages in turns)


def _runs(text: str) -> set[tuple[str, ...]]:
    """Every run of ``SHARED_WORDS`` words, in lower case."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


def paragraphs(path: Path, held_out: str) -> str:
    """Titles and long answers of Natural Questions (gzipped JSON lines), each once, without those in ``held_out``."""
    seen, kept = _runs(held_out), []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        gold = [json.loads(line)["nq_annotated_gold"] for line in lines]
    for answer in gold:
        runs = _runs(answer["long_answer"])
        if runs and not runs & seen:
            kept.append(f"{answer['title']}\n\n{answer['long_answer']}\n\n")
            seen |= runs
    return "".join(kept)


def prepare(data: Path, work: Path) -> dict[str, np.ndarray]:
    """Token arrays by source, made once and kept in ``work``, which has the tokenizer; SystemExit without texts."""
    wikipedia = EVALUATION["wikitext2.test.detok"]
    missing = [name for name in (*TRAIN.values(), CHATS, PARAGRAPHS, wikipedia) if not (data / name).is_file()]
    if missing:
        raise SystemExit(f"{data} lacks {', '.join(missing)}; README.md beside this script says what belongs there")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    template = json.loads((work / "tokenizer" / "tokenizer_config.json").read_text())["chat_template"]
    arrays = {}
    for name in MIXTURE:
        cache = work / f"{name}.npy"
        if not cache.exists():
            if name == "chat":
                text = conversations(data / CHATS, template)
            elif name == "facts":
                text = paragraphs(data / PARAGRAPHS, read(data / wikipedia))
            else:
                text = excerpts(read(data / TRAIN[name]))
            # Renamed when whole: an array cut short by a kill would be trained on without a word.
            partial = cache.with_suffix(".tmp.npy")
            np.save(partial, encode(tokenizer, text, np.int32))
            partial.replace(cache)
        arrays[name] = np.load(cache, mmap_mode="r")
    return arrays


def batch(arrays: dict[str, np.ndarray], step: int, rows: int, window: int, seed: int) -> np.ndarray:
    """int32[rows, window] token windows of one step: a pure function of its arguments, so runs resume exactly."""
    rng = np.random.default_rng((seed, step))
    # Sources in turn rather than drawn (a golden-ratio sequence): with few rows a step, their shares would be noise.
    shares = np.cumsum(list(MIXTURE.values()))
    order = (step * rows + np.arange(rows)) * 0.6180339887498949 % 1
    names = [list(MIXTURE)[min(int(np.searchsorted(shares, place, side="right")), len(shares) - 1)] for place in order]
    out = np.empty((rows, window), np.int32)
    for i, name in enumerate(names):
        start = rng.integers(0, len(arrays[name]) - window)
        out[i] = arrays[name][start : start + window]
    return out

"""Texts of the experiments: held-out ones to score and training ones to calibrate on, by what they stand for."""

import argparse
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pwjax.evaluate.texts import Document, heldout_documents

# Files of the data folder, by kind of text.
HELD_OUT = {
    "prose": "books/books.heldout.txt",
    "code": "code/python_stdlib.heldout.txt",
    "math": "math/gsm8k.test.txt",
    "wiki": "wikitext2/wikitext2.test.detok.txt",
}
TRAINING = {
    "prose": "books/books.train.txt",
    "code": "code/python_stdlib.train.txt",
    "math": "math/gsm8k.train.txt",
}
# Characters of a stretch, for each token that a window needs: a token seldom has more.
CHARACTERS = 12


def read(path: Path) -> str:
    """UTF-8 text, undecodable bytes dropped."""
    return path.read_text(encoding="utf-8", errors="ignore")


def encode(tokenizer: Tokenizer, text: str, dtype: type[np.integer]) -> np.ndarray:
    """Ids of a long text, encoded in pieces cut at line ends."""
    lines, pieces, size = text.splitlines(keepends=True), [[]], 0
    for line in lines:
        pieces[-1].append(line)
        size += len(line)
        if size > 100_000:
            pieces.append([])
            size = 0
    batches = tokenizer.encode_batch(["".join(p) for p in pieces])
    return np.concatenate([np.asarray(b.ids, dtype) for b in batches])


def held_out(args: argparse.Namespace) -> dict[str, str]:
    """The texts of ``--data`` and ``--text``; without either, half of the modules that this Python comes with.

    SystemExit that says what is missing.
    """
    files = dict(entry.split("=", 1) for entry in args.text)
    if args.data:
        files = {name: str(args.data / HELD_OUT[name]) for name in args.kinds} | files
    if not files:
        return {"code": "\n".join(document.text for document in heldout_documents()[1::2])}
    return {name: read(_there(Path(file))) for name, file in files.items()}


def training(args: argparse.Namespace) -> dict[str, Path | str]:
    """The training files of ``--data``; without it, the text of the other half of the modules. SystemExit as above."""
    if args.data:
        return {name: _there(args.data / file) for name, file in TRAINING.items()}
    if args.text:
        sys.exit("calibration needs training texts: give --data DIR")
    return {"code": "\n".join(document.text for document in heldout_documents()[::2])}


def stretches(name: str, text: str, count: int, tokens: int) -> list[Document]:
    """``count`` documents, evenly over a text, each long enough for a window of ``tokens``."""
    size = CHARACTERS * tokens
    starts = np.linspace(0, max(0, len(text) - size), count).astype(int)
    return [Document(f"{name} {i}", text[s : s + size]) for i, s in enumerate(starts)]


def _there(path: Path) -> Path:
    """``path``, or SystemExit."""
    if not path.is_file():
        sys.exit(f"there is no text {path}; experiments/texts.py names the files of a --data folder")
    return path

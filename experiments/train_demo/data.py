"""Text to tokens for the demo model: a byte-level BPE tokenizer and one token array a domain.

Reads ``*.train.*`` files only; the held-out files of the manifest never pass through here.
"""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.texts import encode, read

END = "<|endoftext|>"
DOMAINS = {"prose": "books/books.train.txt", "code": "code/python_stdlib.train.txt", "math": "math/gsm8k.train.txt"}
# Share of training windows drawn from each domain.
MIXTURE = {"prose": 0.47, "code": 0.40, "math": 0.13}
# Characters of each domain that the tokenizer is trained on: even weights, so that code keeps its merges.
TOKENIZER_CHARS = 10_000_000


def train_tokenizer(data: Path, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of ``vocab_size`` entries; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    texts = (read(data / name)[:TOKENIZER_CHARS] for name in DOMAINS.values())
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    return tokenizer


def prepare(data: Path, work: Path, vocab_size: int) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """Tokenizer and token arrays, made once and kept in ``work``; SystemExit where a text is missing."""
    missing = [name for name in DOMAINS.values() if not (data / name).is_file()]
    if missing:
        raise SystemExit(f"{data} lacks {', '.join(missing)}; README.md beside this script says what belongs there")
    work.mkdir(parents=True, exist_ok=True)
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(data, vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() != vocab_size or tokenizer.token_to_id(END) != 0:
        raise SystemExit(f"{path} is not a tokenizer of {vocab_size} entries: give another --vocab, or remove it")
    arrays = {}
    for domain, name in DOMAINS.items():
        cache = work / f"{domain}.npy"
        if not cache.exists():
            # Renamed when whole: an array cut short by a kill would be trained on without a word.
            partial = cache.with_suffix(".tmp.npy")
            np.save(partial, encode(tokenizer, read(data / name), np.uint16))
            partial.replace(cache)
        arrays[domain] = np.load(cache, mmap_mode="r")
    return tokenizer, arrays


def batch(arrays: dict[str, np.ndarray], step: int, rows: int, window: int, seed: int) -> np.ndarray:
    """int32[rows, window + 1] token windows of one step: a pure function of its arguments, so runs resume exactly."""
    rng = np.random.default_rng((seed, step))
    names = rng.choice(list(MIXTURE), size=rows, p=list(MIXTURE.values()))
    out = np.empty((rows, window + 1), np.int32)
    for i, name in enumerate(names):
        start = rng.integers(0, len(arrays[name]) - window - 1)
        out[i] = arrays[name][start : start + window + 1]
    return out

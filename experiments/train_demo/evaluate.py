"""Bits per byte of the demo model on held-out prose and code.

python -m experiments.train_demo.evaluate MODEL --data DIR [--bits N] [--out FILE]

MODEL is a Hugging Face directory, or an artifact (then --bits chooses the precision, 16 being the original). Scores
the first 500 kB of each text with overlapping windows: every token is predicted from at least WINDOW - STRIDE tokens
before it, or from all there are at the start of the text. The very first token, which has nothing before it, costs
log2 of the vocabulary. The bytes are those of the text, so models with other tokenizers compare. ``xz -9e`` and the
limits are printed beside it. Takes some minutes on two cores.
"""

import argparse
import json
import lzma
import math
import sys
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from experiments.texts import encode
from experiments.train_demo.model import load_model
from pwjax import models
from pwjax.environment import versions

TEXTS = {"books": "books/books.heldout.txt", "python_stdlib": "code/python_stdlib.heldout.txt"}
# What a language model of this size has to reach, in bits per byte.
LIMITS = {"books": 2.1, "python_stdlib": 1.8}


def score(config, params: dict, tokens: np.ndarray, window: int, stride: int, label: str) -> float:
    """Bits that ``tokens`` cost, all of them."""
    nll = jax.jit(lambda params, batch: models.next_token_nll(config, params, batch)[0][0])
    bits, scored = math.log2(config.vocab_size), 1
    bar = tqdm(total=len(tokens), initial=1, desc=label, unit="token", file=sys.stderr, disable=None)
    while scored < len(tokens):
        # Windows of one length, so that one program serves them all: the last one starts earlier and overlaps more.
        end = min(len(tokens), scored + (stride if scored > 1 else window))
        start = max(0, end - 1 - window)
        losses = np.asarray(nll(params, tokens[None, start : min(len(tokens), start + window + 1)].astype(np.int32)))
        new = losses[scored - start - 1 : end - start - 1]
        bits += float(new.sum(dtype=np.float64)) / math.log(2)
        bar.update(end - scored)
        scored = end
    bar.close()
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory or artifact")
    parser.add_argument("--data", type=Path, required=True, help="directory with books/ and code/")
    parser.add_argument("--bytes", type=int, default=500_000, help="bytes of each text, from its start")
    parser.add_argument("--bits", type=int, default=16, help="precision of the experts of an artifact")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--stride", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="JSON file; standard output if not given")
    args = parser.parse_args()

    config, params, tokenizer = load_model(args.model, args.bits)
    if not 1 <= args.stride <= args.window <= config.max_positions:
        raise SystemExit(f"--stride <= --window <= {config.max_positions}, the model's context, is needed")
    results = {}
    for name, file in TEXTS.items():
        with open(args.data / file, "rb") as opened:
            # A character cut in two at the end is dropped, and does not count.
            text = opened.read(args.bytes).decode("utf-8", errors="ignore")
        data = text.encode()
        tokens = encode(tokenizer, text, np.uint16)
        bits = score(config, params, tokens, args.window, args.stride, name)
        reached = bits / len(data)
        results[name] = {
            "bits_per_byte": round(reached, 4),
            "bytes": len(data),
            "tokens": len(tokens),
            "perplexity_per_token": round(2 ** (bits / len(tokens)), 3),
            "xz_bits_per_byte": round(8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data), 4),
            "limit": LIMITS[name],
            "within_limit": reached <= LIMITS[name],
        }
        print(f"{name}: {reached:.4f} bits per byte (limit {LIMITS[name]})", file=sys.stderr, flush=True)
    settings = {"bits": args.bits, "window": args.window, "stride": args.stride, "first_token": "log2(vocabulary)"}
    report = json.dumps({"settings": settings, "versions": versions(), "texts": results}, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(report + "\n")
    else:
        print(report)


if __name__ == "__main__":
    main()

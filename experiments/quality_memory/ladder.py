"""A model's experts quantized again with other widths, so that ladders can be compared at equal bytes."""

import argparse
import sys
from pathlib import Path

from experiments import texts
from pwjax.checkpoints.artifact import Artifact
from pwjax.progress import Bars
from pwjax.quantization import quantize


def name_of(artifact: Artifact) -> str:
    """``2-6``: the widths of an artifact."""
    return f"{artifact.geometry.widths[0]}-{artifact.geometry.widths[-1]}"


def requantized(artifact: Artifact, ladder: str, out: Path, args: argparse.Namespace) -> Path:
    """``out``: the 16-bit weights of ``artifact`` in codes of ``ladder`` (``3-6``), made once, a stopped run going on.

    Pages and rows a table are those of ``artifact``, so one width takes the same bytes in both. Calibrated as
    ``pwjax quantize`` does, on ``args.tokens`` of the training texts. SystemExit without 16-bit rows.
    """
    geometry = artifact.geometry
    if not geometry.fallback:
        sys.exit(f"{artifact.path} has no 16-bit rows to quantize again: give --ladders {name_of(artifact)}")
    if not out.exists():
        bars = Bars()
        quantize(
            artifact.source().tree(), artifact.config, out, bits=ladder, text=list(texts.training(args).values()),
            tokenizer=artifact.tokenizer_path, page_words=geometry.page_words,
            lut_rows=(geometry.gate_up.lut_rows, geometry.down.lut_rows), tokens=args.tokens, jobs=0, progress=bars,
            note=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
        bars.close()
    return out

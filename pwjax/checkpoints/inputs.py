"""What quantization is given: a checked parameter tree by flat name, and the tokenizer's files."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pwjax.calibration_text import load_tokenizer
from pwjax.checkpoints.lazy import LayerStack, bf16
from pwjax.checkpoints.orbax import load_orbax, params_of
from pwjax.checkpoints.tree import flatten, name_all, param_shapes, shape_problems
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def checked_params(params: Any, config: ModelConfig) -> dict[str, np.ndarray | LayerStack]:
    """All parameters by flat name; CheckpointError that names what is missing, extra, misshapen or not a number."""
    tree = load_orbax(params) if isinstance(params, str | os.PathLike) else params_of(params)
    # A stack of layers stays on disk: it is read layer by layer where it is used.
    flat = {n: v if isinstance(v, LayerStack) else np.asarray(v) for n, v in flatten(tree).items()}
    wanted = param_shapes(config)
    problems = shape_problems({name: value.shape for name, value in flat.items()}, wanted)
    floats = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
    problems += [f"{name} is {value.dtype}, not a float" for name, value in flat.items() if value.dtype not in floats]
    if not problems:
        # Piece by piece: a whole expert tensor in float32 would double the memory.
        problems += [
            f"{name} has values that are not finite"
            for name, value in flat.items()
            if not all(np.isfinite(bf16(part)).all() for part in value)
        ]
    if problems:
        raise CheckpointError(f"the parameters do not fit the model config: {name_all(problems)}")
    return flat


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """Contents of the tokenizer's files by name; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    if not isinstance(tokenizer, str | os.PathLike):
        return {"tokenizer.json": load_tokenizer(tokenizer).to_str(pretty=False).encode()}
    load_tokenizer(tokenizer)  # refuse a broken one before any work
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    found = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if Path(tokenizer).is_file():
        found["tokenizer.json"] = Path(tokenizer).read_bytes()
    return found

"""The files of a Hugging Face checkpoint directory: JSON, shards and their headers, and what is wrong with them."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from pwjax.errors import CheckpointError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"

_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


class Tensor(NamedTuple):
    """Where a tensor is, its shape, and its type as safetensors spells it (``BF16``)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


class Headers(NamedTuple):
    """All ``tensors`` by name, ``problems`` with the shards, and the names ``lost`` with unreadable shards.

    ``stale`` are safetensors files that the index does not list; they are not read.
    """

    tensors: dict[str, Tensor]
    problems: list[str]
    lost: set[str]
    stale: list[str]


def read_json(file: Path) -> dict:
    """A JSON object from a file; CheckpointError where there is none."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is not a Hugging Face checkpoint: it has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return data


def read_headers(path: Path) -> Headers:
    """Headers of every shard; no tensor is read. CheckpointError where it is not clear which files belong."""
    index = _read_index(path)
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    lost: set[str] = set()
    files = [SINGLE] if index is None else sorted(set(index.values()))
    for name in files:
        file = path / name
        listed = {key for key, shard in (index or {}).items() if shard == name}
        try:
            with safe_open(file, "numpy") as opened:
                slices = {key: opened.get_slice(key) for key in opened.keys()}
                own = {k: Tensor(file, tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
        except (OSError, SafetensorError) as error:
            broken = f"is truncated or not a safetensors file ({error})"
            problems.append(f"{name} {broken if file.is_file() else 'is missing'}")
            if index is None:
                raise CheckpointError(f"the checkpoint at {path} cannot be used: {problems[0]}") from error
            lost |= listed
            continue
        twice = [f"{key} is both in {tensors[key].file.name} and in {name}" for key in own if key in tensors]
        problems += collapse(twice)
        if index is not None:
            absent, stray = sorted(listed - set(own)), sorted(key for key in own if key not in index)
            problems += collapse([f"{key} is not in {name}, where {INDEX} lists it" for key in absent])
            problems += collapse([f"{key} is in {name}, but not in {INDEX}" for key in stray])
            lost |= set(absent)
        tensors |= own
    stale = sorted(p.name for p in path.glob("*.safetensors") if p.name not in files)
    return Headers(tensors, problems, lost, stale)


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name to shard name; None for a checkpoint in one file."""
    single, indexed = (path / SINGLE).exists(), (path / INDEX).exists()
    if single and indexed:
        raise CheckpointError(f"{path} has both {SINGLE} and {INDEX}; remove the one that is not meant")
    if single:
        return None
    if not indexed:
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
        beside = f"; it has {', '.join(others)}" if others else ""
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}{beside}: only safetensors checkpoints are read")
    weights = read_json(path / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    outside = sorted({str(f) for f in weights.values() if not isinstance(f, str) or Path(f).name != f})
    if outside:
        raise CheckpointError(f"{path / INDEX} lists files outside of the directory: {', '.join(outside)}")
    return weights


def collapse(problems: list[str]) -> list[str]:
    """Join problems that differ in consecutive layers or experts: every name stays told, in few words."""
    for word in ("experts", "layers"):
        groups: dict[tuple[str, str], list[int]] = {}
        for text in problems:
            head, mark, tail = text.partition(f".{word}.")
            number = re.match(r"\d+", tail)
            key = (head + mark, tail[number.end() :]) if number else (text, "")
            groups.setdefault(key, []).extend([int(number[0])] if number else [])
        problems = []
        for (head, tail), numbers in groups.items():
            problems += [f"{head}{run}{tail}" for run in _runs(sorted(numbers))] if numbers else [head]
    return problems


def _runs(numbers: list[int]) -> list[str]:
    """``[0, 1, 2, 5]`` to ``["0-2", "5"]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in runs]

"""Packs of ``any-precision-llm``: a quantized checkpoint of another project, read as it is, without calibrating again.

A directory with the Hugging Face ``config.json``, whose field ``anyprec`` gives seed and parent width, and one
``pytorch_model.bin`` or safetensors. A quantized matrix ``X`` has ``X.qweight`` and ``X.lut{b}`` instead of
``X.weight``; experts are stored one by one, as on the hub, gate and up apart.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from calib.anyprecision import QuantizedBlock, dequantize
from calib.packs import pack_block
from pwjax.checkpoints.hf import model_config
from pwjax.checkpoints.hf_files import CONFIG, collapse, read_headers, read_json
from pwjax.checkpoints.hf_names import Names, Part
from pwjax.checkpoints.lazy import LayerStack, bf16
from pwjax.checkpoints.source import stack_layers
from pwjax.checkpoints.tree import EXPERTS, param_shapes, shape_problems
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError

PICKLE = "pytorch_model.bin"
FIELD = "anyprec"
_WEIGHT, _CODES = ".weight", ".qweight"


def is_pack(path: str | os.PathLike) -> bool:
    """Whether a directory is a pack: its config says so."""
    config = Path(path) / CONFIG
    return config.is_file() and FIELD in read_json(config)


class AnyPrecisionPack:
    """A pack whose names, types and shapes were checked, read on demand.

    ``path``, ``config`` (ModelConfig), ``widths`` (seed to parent), ``files`` (list of those that hold tensors). Raises
    CheckpointError, with a sentence that names every tensor that is missing, unexpected or misshapen.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        data = read_json(self.path / CONFIG)
        self.widths = _widths(data.pop(FIELD, None), self.path / CONFIG)
        self.config: ModelConfig = model_config(self.path, data)
        self._shapes, self.files, self._read = _open(self.path)
        # The names that the matrices had before they were quantized.
        names = {n.removesuffix(_CODES) + _WEIGHT if n.endswith(_CODES) else n for n in self._shapes}
        self._names = Names(self.config, names)
        problems = self._problems()
        if problems:
            raise CheckpointError(f"the pack at {self.path} cannot be used: {'; '.join(problems)}")

    def block(self, layer: int, expert: int, matrix: int) -> QuantizedBlock:
        """Codes and tables of one block; CheckpointError for tables that are no numbers."""
        parts = [p for p in self._names.parts(EXPERTS[matrix], layer) if p.index[0] == expert]
        return self._block(parts)

    def dense(self) -> dict[str, np.ndarray | LayerStack]:
        """Everything but the routed experts by flat name, bfloat16, layers left on disk.

        Matrices that the pack quantized, such as those of attention, are dequantized at its parent width.
        """
        return {
            name: self._dense(name, shape) for name, shape in param_shapes(self.config).items() if name not in EXPERTS
        }

    def _dense(self, name: str, shape: tuple[int, ...]) -> np.ndarray | LayerStack:
        if not name.startswith("layers/"):
            return self._fill(shape, self._names.parts(name, None))
        layers = stack_layers(self.config, name)
        return LayerStack(shape, lambda index: self._fill(shape[1:], self._names.parts(name, layers[index])))

    def _fill(self, shape: tuple[int, ...], parts: list[Part]) -> np.ndarray:
        out = np.empty(shape, ml_dtypes.bfloat16)
        for part in parts:
            whole = part.name in self._shapes
            value = self._read(part.name) if whole else dequantize(self._block([part]), self.widths[-1])
            out[part.index] = bf16(value)
        return out

    def _block(self, parts: list[Part]) -> QuantizedBlock:
        stored = []
        for part in parts:
            stem = part.name.removesuffix(_WEIGHT)
            stored.append((self._read(stem + _CODES), {b: self._read(f"{stem}.lut{b}") for b in self.widths}))
        try:
            return pack_block(stored)
        except ValueError as error:
            raise CheckpointError(
                f"{parts[0].name.removesuffix(_WEIGHT)} of {self.path} cannot be used: {error}"
            ) from error

    def _problems(self) -> list[str]:
        """What is wrong with the tensors; experts must be quantized, anything else may be."""
        wanted: dict[str, tuple[int, ...]] = {}
        for param, _, parts in self._names.all_parts():
            for part in parts:
                stem = part.name.removesuffix(_WEIGHT)
                if param not in EXPERTS and stem + _CODES not in self._shapes:
                    wanted[part.name] = part.shape
                    continue
                if len(part.shape) != 2:
                    shape = list(part.shape)
                    return [f"{stem} is one tensor of {shape}, and packs hold matrices, those of experts one by one"]
                rows, cols = part.shape
                if cols % 32:
                    return [f"{stem} has {cols} columns, and packs hold multiples of 32"]
                wanted[stem + _CODES] = (self.widths[-1], rows, cols // 32)
                wanted |= {f"{stem}.lut{b}": (rows, 1 << b) for b in self.widths}
        spare = {**self._names.empty_shared(), self._names.head: wanted.get(self._names.embedding, ())}
        have = {n: s for n, s in self._shapes.items() if n in wanted or n not in spare}
        have = {n: s for n, s in have.items() if not n.endswith(".rotary_emb.inv_freq")}
        return collapse(shape_problems(have, wanted))


class _Tensors(NamedTuple):
    """Tensors of a pack: their ``shapes`` by name, the ``files`` they lie in, and ``read(name)``."""

    shapes: dict[str, tuple[int, ...]]
    files: list[Path]
    read: Callable[[str], np.ndarray]


def _open(path: Path) -> _Tensors:
    return _open_pickle(path / PICKLE) if (path / PICKLE).exists() else _open_safetensors(path)


def _open_safetensors(path: Path) -> _Tensors:
    headers = read_headers(path)
    if headers.problems:
        raise CheckpointError(f"the pack at {path} cannot be used: {'; '.join(headers.problems)}")

    def read(name: str) -> np.ndarray:
        file = headers.tensors[name].file
        try:
            with safe_open(file, "numpy") as opened:
                return opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    files = sorted({tensor.file for tensor in headers.tensors.values()})
    return _Tensors({name: tensor.shape for name, tensor in headers.tensors.items()}, files, read)


def _open_pickle(pickle: Path) -> _Tensors:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{pickle} is a pickle, which takes torch to read: pip install torch, or convert it to safetensors"
        ) from None
    try:
        # Tensors only: a pickle can run any code when it is loaded in full.
        tensors = torch.load(pickle, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever the file makes it
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{pickle} is not a file of tensors alone and is not loaded: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{pickle} does not hold tensors by name")

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        # NumPy lacks torch's bfloat16.
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    return _Tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, [pickle], read)


def _widths(facts: Any, file: Path) -> tuple[int, ...]:
    """Widths from the ``anyprec`` field; CheckpointError where it describes another kind of pack."""
    if not isinstance(facts, dict):
        raise CheckpointError(f"{file} has no {FIELD!r}: this is not an any-precision pack")
    seed, parent = facts.get("seed_precision"), facts.get("parent_precision")
    if not isinstance(seed, int) or not isinstance(parent, int) or not 2 <= seed <= parent <= 8:
        raise CheckpointError(
            f"{file} gives seed_precision {seed} and parent_precision {parent}; only nested packs within 2..8 can be "
            "imported"
        )
    if facts.get("group_count", 1) != 1:
        raise CheckpointError(
            f"{file} has group_count {facts['group_count']}; only 1, a table per row, can be imported"
        )
    return tuple(range(seed, parent + 1))

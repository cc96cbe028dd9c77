"""Hugging Face checkpoints: reading a directory in one piece or layer by layer."""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from pwjax.checkpoints.hf_files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    collapse,
    read_headers,
    read_json,
)
from pwjax.checkpoints.hf_names import Names, Part
from pwjax.checkpoints.hf_save import save_hf as save_hf
from pwjax.checkpoints.inputs import load_tokenizer
from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.source import ParamSource, stack_layers
from pwjax.checkpoints.tree import param_shapes, shape_problems, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError
from pwjax.units import format_bytes

_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Old versions of transformers stored this table, which follows from the config.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")

Note = Callable[[str], None]


class HFCheckpoint:
    """A checkpoint directory whose names, types and shapes were checked, read on demand.

    ``path``, ``config`` (ModelConfig), ``notes`` (sentences worth showing, such as a rounded type). All parameters are
    given out as ``dtype``, bfloat16 or float32. Raises CheckpointError that names every shard and every tensor that is
    missing, unexpected or misshapen; only headers have been read by then.
    """

    def __init__(self, path: str | os.PathLike, dtype: DTypeLike = ml_dtypes.bfloat16):
        self.path, self.dtype = Path(path), np.dtype(dtype)
        self.config = _read_config(self.path)
        tensors, problems, lost, stale = read_headers(self.path)
        self._names = Names(self.config, {*tensors, *lost})
        skipped = [tensors.pop(name) for name in self._names.skipped() if name in tensors]
        self._tensors = tensors
        problems += self._problems(lost)
        if problems:
            raise CheckpointError(f"the checkpoint at {self.path} cannot be used: {'; '.join(problems)}")
        self.notes = [f"{name} is not part of the checkpoint and is not read" for name in stale]
        if skipped:
            self.notes.append(
                f"{len(skipped)} tensors of the vision and audio towers are skipped "
                f"({format_bytes(sum(t.nbytes for t in skipped))}): only the text model is read"
            )
        wide = sorted({t.dtype for t in tensors.values()} - {"BF16"})
        kinds = " and ".join(_FLOATS[dtype] for dtype in wide)
        if wide and self.dtype.itemsize == 2:
            self.notes.append(f"{self.path.name} holds {kinds} tensors; they are rounded to bfloat16")

    @property
    def files(self) -> list[Path]:
        """Files that hold tensors of the model."""
        return sorted({tensor.file for tensor in self._tensors.values()})

    def source(self) -> ParamSource:
        """All parameters, those of layers left on disk until one is asked for."""
        stack = lambda name, shape: LayerStack(shape, lambda index: self._layer(name, index), self.dtype)  # noqa: E731
        return ParamSource(
            self.config,
            {
                name: stack(name, shape) if name.startswith("layers/") else self._whole(name)
                for name, shape in param_shapes(self.config).items()
            },
            self.dtype,
        )

    def params(self) -> dict:
        """The whole parameter tree in memory."""
        return unflatten({name: self._whole(name) for name in param_shapes(self.config)})

    def _whole(self, name: str) -> np.ndarray:
        out = np.empty(param_shapes(self.config)[name], self.dtype)
        if not name.startswith("layers/"):
            return self._fill(out, self._names.parts(name, None))
        for index, layer in enumerate(stack_layers(self.config, name)):
            self._fill(out[index], self._names.parts(name, layer))
        return out

    def _layer(self, name: str, index: int) -> np.ndarray:
        """One entry of a stacked parameter, by its place in the stack."""
        layer = stack_layers(self.config, name)[index]
        out = np.empty(param_shapes(self.config)[name][1:], self.dtype)
        return self._fill(out, self._names.parts(name, layer))

    def _fill(self, out: np.ndarray, pieces: list[Part]) -> np.ndarray:
        """Put checkpoint tensors where they belong in ``out``."""
        # Files are mapped for one call: a mapping that stays open would count all that was read as this process's.
        files: dict[Path, Any] = {}
        for part in pieces:
            path = self._tensors[part.name].file
            try:
                if path not in files:
                    files[path] = safe_open(path, "numpy")
                out[part.index] = files[path].get_tensor(part.name).astype(self.dtype, copy=False)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return out

    def _problems(self, lost: set[str]) -> list[str]:
        """What is wrong with the tensors, those ``lost`` with their shard aside."""
        config, names, tensors = self.config, self._names, self._tensors
        wanted = {part.name: part.shape for _, _, pieces in names.all_parts() for part in pieces}
        wanted = {name: shape for name, shape in wanted.items() if name not in lost or name in tensors}
        optional = names.empty_shared()
        if config.tie_embeddings:
            optional[names.head] = (config.vocab_size, config.hidden_size)
        wanted |= {name: shape for name, shape in optional.items() if name in tensors}
        found = {name: t.shape for name, t in tensors.items() if name in wanted or not _IGNORED.search(name)}
        problems = collapse(shape_problems(found, wanted))
        problems += collapse(
            [f"{name} is stored as {t.dtype}, not as a float" for name, t in tensors.items() if t.dtype not in _FLOATS]
        )
        if not problems and not lost and config.tie_embeddings and names.head in tensors:
            shape = optional[names.head]
            both = [np.empty(shape, self.dtype) for _ in range(2)]
            for out, name in zip(both, (names.head, names.embedding), strict=True):
                self._fill(out, [Part(name, shape, ())])
            if not both[0].tobytes() == both[1].tobytes():
                problems.append(f"{names.head} differs from the embedding, but {CONFIG} says they are tied")
        return problems


def load_hf(
    path: str | os.PathLike, note: Note | None = None, dtype: DTypeLike = ml_dtypes.bfloat16
) -> tuple[ModelConfig, dict]:
    """Read the checkpoint directory ``path``: its config, and the parameter tree as NumPy arrays.

    ``dtype`` is bfloat16, as artifacts keep it, or float32. One ``model.safetensors`` or shards with an index; routed
    experts one by one or fused. ``note`` is told what is worth knowing, such as float32 tensors that are rounded
    (default: a warning). Raises CheckpointError as :class:`HFCheckpoint` does.
    """
    checkpoint = HFCheckpoint(path, dtype)
    for text in checkpoint.notes:
        warnings.warn(text, stacklevel=2) if note is None else note(text)
    return checkpoint.config, checkpoint.params()


def _read_config(path: Path) -> ModelConfig:
    """The model config of a directory, with the end tokens that its other files add."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint directory at {path}")
    return model_config(path, read_json(path / CONFIG))


def model_config(path: Path, data: dict) -> ModelConfig:
    """The model config that ``data`` describes, with the end tokens that the other files of ``path`` add."""
    config = ModelConfig.from_hf(data)
    ids = dict.fromkeys((*config.eos_token_ids, *end_token_ids(path)))
    # A vocabulary can be longer than the model's: what the model cannot say ends nothing.
    return replace(config, eos_token_ids=tuple(i for i in ids if i < config.vocab_size))


def end_token_ids(path: Path) -> tuple[int, ...]:
    """Tokens that end a text by ``generation_config.json`` (one or a list) and by the tokenizer of a directory."""
    ids: list[int | None] = []
    if (path / GENERATION).exists():
        eos = read_json(path / GENERATION).get("eos_token_id")
        ids += [] if eos is None else eos if isinstance(eos, list) else [eos]
    if (path / TOKENIZER_CONFIG).exists() and (path / TOKENIZER).exists():
        token = read_json(path / TOKENIZER_CONFIG).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        ids += [] if text is None else [load_tokenizer(path).token_to_id(text)]
    return tuple(i for i in ids if i is not None)

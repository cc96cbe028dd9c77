"""Hugging Face checkpoints: reading a directory in one piece or layer by layer, and writing one."""

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from pwjax.checkpoints.hf_files import CONFIG, GENERATION, SINGLE, collapse, read_headers, read_json
from pwjax.checkpoints.hf_names import Part, all_parts, empty_shared, parts
from pwjax.checkpoints.inputs import tokenizer_files
from pwjax.checkpoints.lazy import LayerStack, bf16
from pwjax.checkpoints.orbax import params_of
from pwjax.checkpoints.safetensors_file import write_bf16
from pwjax.checkpoints.source import ParamSource, stack_layers
from pwjax.checkpoints.tree import flatten, param_shapes, shape_problems, unflatten
from pwjax.checkpoints.writer import refuse_taken
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError, CheckpointError

_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Old versions of transformers stored this table, which follows from the config.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_SLACK_BYTES = 4 << 20

Note = Callable[[str], None]


class HFCheckpoint:
    """A checkpoint directory whose names, types and shapes were checked, read on demand.

    ``path``, ``config`` (ModelConfig), ``notes`` (sentences worth showing, such as a rounded type). All parameters are
    bfloat16. Raises CheckpointError that names every shard and every tensor that is missing, unexpected or misshapen;
    only headers have been read by then.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config = _read_config(self.path)
        self._tensors, problems, lost = read_headers(self.path)
        problems += self._problems(lost)
        if problems:
            raise CheckpointError(f"the checkpoint at {self.path} cannot be used: {'; '.join(problems)}")
        wide = sorted({t.dtype for t in self._tensors.values()} - {"BF16"})
        kinds = " and ".join(_FLOATS[dtype] for dtype in wide)
        self.notes = [f"{self.path.name} holds {kinds} tensors; they are rounded to bfloat16"] if wide else []

    def source(self) -> ParamSource:
        """All parameters, those of layers left on disk until one is asked for."""
        stack = lambda name, shape: LayerStack(shape, lambda index: self._layer(name, index))  # noqa: E731
        return ParamSource(
            self.config,
            {
                name: stack(name, shape) if name.startswith("layers/") else self._whole(name)
                for name, shape in param_shapes(self.config).items()
            },
        )

    def params(self) -> dict:
        """The whole parameter tree in memory."""
        return unflatten({name: self._whole(name) for name in param_shapes(self.config)})

    def _whole(self, name: str) -> np.ndarray:
        out = np.empty(param_shapes(self.config)[name], ml_dtypes.bfloat16)
        if not name.startswith("layers/"):
            return self._fill(out, parts(self.config, name, None))
        for index, layer in enumerate(stack_layers(self.config, name)):
            self._fill(out[index], parts(self.config, name, layer, self._tensors))
        return out

    def _layer(self, name: str, index: int) -> np.ndarray:
        """One entry of a stacked parameter, by its place in the stack."""
        layer = stack_layers(self.config, name)[index]
        out = np.empty(param_shapes(self.config)[name][1:], ml_dtypes.bfloat16)
        return self._fill(out, parts(self.config, name, layer, self._tensors))

    def _fill(self, out: np.ndarray, pieces: list[Part]) -> np.ndarray:
        """Put checkpoint tensors where they belong in ``out``."""
        # Files are mapped for one call: a mapping that stays open would count all that was read as this process's.
        files: dict[Path, Any] = {}
        for part in pieces:
            path = self._tensors[part.name].file
            try:
                if path not in files:
                    files[path] = safe_open(path, "numpy")
                out[part.index] = bf16(files[path].get_tensor(part.name))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return out

    def _problems(self, lost: set[str]) -> list[str]:
        """What is wrong with the tensors, those ``lost`` with their shard aside."""
        config, tensors = self.config, self._tensors
        wanted = {part.name: part.shape for _, _, pieces in all_parts(config, {*tensors, *lost}) for part in pieces}
        wanted = {name: shape for name, shape in wanted.items() if name not in lost or name in tensors}
        optional = empty_shared(config)
        if config.tie_embeddings:
            optional["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        wanted |= {name: shape for name, shape in optional.items() if name in tensors}
        found = {name: t.shape for name, t in tensors.items() if name in wanted or not _IGNORED.search(name)}
        problems = collapse(shape_problems(found, wanted))
        problems += collapse(
            [f"{name} is stored as {t.dtype}, not as a float" for name, t in tensors.items() if t.dtype not in _FLOATS]
        )
        if not problems and not lost and config.tie_embeddings and "lm_head.weight" in tensors:
            shape = optional["lm_head.weight"]
            both = [np.empty(shape, ml_dtypes.bfloat16) for _ in range(2)]
            for out, name in zip(both, ("lm_head.weight", "model.embed_tokens.weight"), strict=True):
                self._fill(out, [Part(name, shape, ())])
            if not np.array_equal(both[0].view(np.uint16), both[1].view(np.uint16)):
                problems.append(f"lm_head.weight differs from the embedding, but {CONFIG} says they are tied")
        return problems


def load_hf(path: str | os.PathLike, note: Note | None = None) -> tuple[ModelConfig, dict]:
    """Read the checkpoint directory ``path``: its config, and the parameter tree as bfloat16 NumPy arrays.

    One ``model.safetensors`` or shards with an index; routed experts one by one or fused; float16 and float32 are
    rounded, which ``note`` is told (default: a warning). Raises CheckpointError as :class:`HFCheckpoint` does.
    """
    checkpoint = HFCheckpoint(path)
    for text in checkpoint.notes:
        warnings.warn(text, stacklevel=2) if note is None else note(text)
    return checkpoint.config, checkpoint.params()


def save_hf(
    path: str | os.PathLike,
    config: ModelConfig,
    params: Any,
    tokenizer_file: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write ``params`` as a checkpoint directory that transformers reads; returns its path.

    ``params``: the parameter tree (NumPy, JAX or :class:`LayerStack`; rounded to bfloat16), or a train state that
    holds it. ``tokenizer_file``: a ``tokenizer.json`` or its directory, copied with its sibling files; what is not
    there of ``tokenizer_config.json`` and ``generation_config.json`` is made. ``progress(tensors, all tensors)``.

    Written beside ``path`` and renamed when whole. Raises CheckpointError where ``path`` is taken, the tree does not
    fit the config, the tokenizer has more entries than the model, or the disk is full.
    """
    path = Path(path)
    try:
        refuse_taken(path)
    except ArtifactError as error:
        raise CheckpointError(str(error)) from None
    flat = {n: v if isinstance(v, LayerStack) else np.asarray(v) for n, v in flatten(params_of(params)).items()}
    problems = shape_problems({name: value.shape for name, value in flat.items()}, param_shapes(config))
    if problems:
        raise CheckpointError(f"the parameters do not fit the model config: {'; '.join(problems)}")
    files = _side_files(config, tokenizer_file)
    empty = empty_shared(config)
    shapes = {part.name: part.shape for _, _, pieces in all_parts(config) for part in pieces} | empty

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        count = 0
        for name, layer, pieces in all_parts(config):
            value: np.ndarray = np.asarray(flat[name] if layer is None else flat[name][layer])
            for part in pieces:
                yield part.name, value[part.index]
                count += 1
                progress(count, len(shapes))
        for name, shape in empty.items():
            yield name, np.zeros(shape, ml_dtypes.bfloat16)

    partial = path.with_name(f"{path.name}.partial.{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _reserve(partial, 2 * sum(int(np.prod(shape)) for shape in shapes.values()) + sum(map(len, files.values())))
        write_bf16(partial / SINGLE, shapes, tensors(), {"format": "pt"})
        for name, data in files.items():
            (partial / name).write_bytes(data)
        for file in partial.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        os.rename(partial, path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full; free some space" if full else error.strerror or str(error)
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _side_files(config: ModelConfig, tokenizer: str | os.PathLike | None) -> dict[str, bytes]:
    """Everything but the tensors: config, tokenizer and generation settings, by file name."""
    files = tokenizer_files(tokenizer)
    eos = list(config.eos_token_ids)
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_str(files["tokenizer.json"].decode())
        size = max(loaded.get_vocab().values(), default=-1) + 1
        if size > config.vocab_size:
            raise CheckpointError(
                f"the tokenizer has ids up to {size - 1}, but the model has only {config.vocab_size} entries"
            )
        settings: dict = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings["model_max_length"] = config.max_positions
        ids = {"eos_token": eos[0] if eos else None, "bos_token": config.bos_token_id}
        settings |= {name: loaded.id_to_token(i) for name, i in ids.items() if i is not None}
        files.setdefault("tokenizer_config.json", _json(settings))
    if eos:
        generation: dict = {"eos_token_id": eos[0] if len(eos) == 1 else eos}
        if config.bos_token_id is not None:
            generation["bos_token_id"] = config.bos_token_id
        files.setdefault(GENERATION, _json(generation))
    return {CONFIG: _json(config.to_hf()), **files}


def _json(data: Mapping) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _reserve(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if need_bytes + _SLACK_BYTES > free:
        raise CheckpointError(
            f"not enough disk space in {folder.parent}: {need_bytes / 2**30:.2f} GiB are needed, "
            f"{free / 2**30:.2f} GiB are free; free some or choose another place"
        )


def _read_config(path: Path) -> ModelConfig:
    """The model config of a directory, with the end tokens that ``generation_config.json`` adds."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint directory at {path}")
    config = ModelConfig.from_hf(read_json(path / CONFIG))
    if not (path / GENERATION).exists():
        return config
    eos = read_json(path / GENERATION).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ids))))

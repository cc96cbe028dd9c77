"""Writing a Hugging Face checkpoint directory: streamed layer by layer, in shards, with config and tokenizer."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pwjax.checkpoints.hf_files import CONFIG, GENERATION, INDEX, SINGLE
from pwjax.checkpoints.hf_names import Names
from pwjax.checkpoints.inputs import tokenizer_files
from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.orbax import params_of
from pwjax.checkpoints.safetensors_file import write_tensors
from pwjax.checkpoints.source import stack_layers
from pwjax.checkpoints.tree import flatten, param_shapes, shape_problems
from pwjax.checkpoints.writer import refuse_taken
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError, CheckpointError

SHARD_BYTES = 5_000_000_000
_SLACK_BYTES = 4 << 20
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def save_hf(
    path: str | os.PathLike,
    config: ModelConfig,
    params: Any,
    tokenizer_file: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    dtype: str = "bfloat16",
) -> Path:
    """Write ``params`` as a checkpoint directory that transformers reads; returns its path.

    ``params``: the parameter tree (NumPy, JAX or :class:`LayerStack`; rounded to ``dtype``, "bfloat16" or "float32"),
    or a train state that holds it. ``tokenizer_file``: a ``tokenizer.json`` or its directory, copied with its sibling
    files; what is not there of ``tokenizer_config.json`` and ``generation_config.json`` is made. ``progress(tensors,
    all tensors)``. Tensors of more than ``shard_bytes`` together go to several files with an index.

    What is read back has an equal config. Gemma scales embeddings by a root that the type in ``config.json`` rounds, so
    that the type stays where ``dtype`` would change the root: transformers then loads float32 tensors as bfloat16
    unless it is told another type, and told float32 it scales by a root that is not rounded.

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
    files = _side_files(config, tokenizer_file, dtype)
    names = Names(config)
    empty = names.empty_shared()
    shapes = {part.name: part.shape for _, _, pieces in names.all_parts() for part in pieces} | empty
    sizes = {name: np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape) for name, shape in shapes.items()}
    shards = _shards(sizes, shard_bytes)
    if len(shards) > 1:
        weights = {name: file for file, own in shards.items() for name in own}
        files[INDEX] = _json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights})

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        count = 0
        for name, layer, pieces in names.all_parts():
            value = flat[name] if layer is None else flat[name][stack_layers(config, name).index(layer)]
            for part in pieces:
                yield part.name, np.asarray(value)[part.index]
                count += 1
                progress(count, len(shapes))
        for name, shape in empty.items():
            yield name, np.zeros(shape, ml_dtypes.bfloat16)

    partial = path.with_name(f"{path.name}.partial.{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _reserve(partial, sum(sizes.values()) + sum(map(len, files.values())))
        stream = tensors()
        for name, own in shards.items():
            # A generator read past the end of a shard would lose the next one's first tensor.
            own_shapes = {key: shapes[key] for key in own}
            write_tensors(partial / name, own_shapes, islice(stream, len(own)), {"format": "pt"}, _DTYPES[dtype])
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


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Tensors by the file that they go to, in order; a file is closed before it would pass ``shard_bytes``."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}


def _side_files(config: ModelConfig, tokenizer: str | os.PathLike | None, dtype: str) -> dict[str, bytes]:
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
    described = config.to_hf()
    typed = {**described, "torch_dtype": dtype}  # what transformers loads it as
    if dtype != "bfloat16" and ModelConfig.from_hf(typed) == ModelConfig.from_hf(described):
        described = typed
    return {CONFIG: _json(described), **files}


def _json(data: Mapping) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _reserve(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if need_bytes + _SLACK_BYTES > free:
        raise CheckpointError(
            f"not enough disk space in {folder.parent}: {need_bytes / 2**30:.2f} GiB are needed, "
            f"{free / 2**30:.2f} GiB are free; free some or choose another place"
        )

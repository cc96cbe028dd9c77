"""Parameters from an Orbax directory: a checkpoint, or the root of a checkpoint manager (its newest step)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pwjax.checkpoints.tree import flatten, unflatten
from pwjax.errors import CheckpointError

# Items and keys under which training loops usually keep the parameters, in the order they are looked for.
_KEYS = ("params", "default", "state", "model", "variables")


def load_orbax(path: str | os.PathLike) -> dict:
    """Nested dictionary of NumPy arrays with the model's parameters, whatever devices they were saved from.

    Other entries of a train state (optimizer, step) are left out. CheckpointError where there is no checkpoint or no
    parameter tree in it.
    """
    path = _newest(Path(path).absolute())
    import orbax.checkpoint as ocp  # slow to import, and only needed here

    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(path).item_metadata.tree
            args = _map(tree, lambda _leaf: ocp.RestoreArgs(restore_type=np.ndarray))
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
        except (ValueError, FileNotFoundError, KeyError, AttributeError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable Orbax checkpoint: {error}") from error
    return params_of(restored, str(path))


def params_of(tree: Any, where: str = "the given tree") -> dict:
    """The parameter tree inside ``tree``: itself, or what is under ``params`` of a train state or of variables."""
    inner = tree
    for _ in range(4):
        if isinstance(inner, Mapping):
            if "embed" in inner or "layers" in inner:
                return unflatten(flatten(inner))
            inner = next((inner[key] for key in _KEYS if key in inner), None)
        else:
            inner = getattr(inner, "params", None)  # a train state object
    raise CheckpointError(
        f"{where} has no parameters of this model: expected `embed`, `layers`, … or a tree with `params`"
    )


def _newest(path: Path) -> Path:
    """Descend from a manager's root to the newest step, and from a step to the item with the parameters."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint directory at {path}")
    steps = [p for p in path.iterdir() if p.is_dir() and p.name.isdigit()]
    if steps:
        path = max(steps, key=lambda p: int(p.name))
    if not (path / "_METADATA").exists():
        for key in _KEYS:
            if (path / key / "_METADATA").exists():
                return path / key
        raise CheckpointError(f"{path} is not an Orbax checkpoint: it has no _METADATA")
    return path


def _map(tree: Any, leaf: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map(value, leaf) for value in tree]
    return leaf(tree)

"""The parameter tree as a flat dictionary: the names and shapes a model must have, and what is wrong with a tree."""

from collections.abc import Mapping
from typing import Any

from pwjax.config import ModelConfig
from pwjax.shapes import param_shapes as param_shapes

EXPERTS = ("layers/experts/gate_up", "layers/experts/down")

# Names listed in one error before the rest is only counted.
_MAX_NAMED = 8


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """:func:`param_shapes` without the routed experts: what is never paged."""
    return {name: shape for name, shape in param_shapes(config).items() if name not in EXPERTS}


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mapping of arrays to ``{"a/b": array}``, sorted by name."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": leaf for key, leaf in flatten(value).items()}
        else:
            flat[str(name)] = value
    return dict(sorted(flat.items()))


def unflatten(flat: Mapping[str, Any]) -> dict:
    """Inverse of :func:`flatten`."""
    tree: dict = {}
    for name, value in flat.items():
        node = tree
        *path, leaf = name.split("/")
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def shape_problems(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One phrase for every missing, extra or misshapen tensor, in that order."""
    missing = [f"{name} is missing" for name in wanted if name not in found]
    extra = [f"{name} is not part of this model" for name in found if name not in wanted]
    wrong = [
        f"{name} has the shape {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return missing + extra + wrong


def name_all(problems: list[str]) -> str:
    """The problems as one phrase, the first few in full."""
    rest = len(problems) - _MAX_NAMED
    return "; ".join(problems[:_MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")

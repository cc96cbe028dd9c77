"""The parameter tree as a flat dictionary: the names and shapes a model must have, and what is wrong with a tree."""

from collections.abc import Mapping
from typing import Any

from pwjax.config import ModelConfig

EXPERTS = ("layers/experts/gate_up", "layers/experts/down")

# Names listed in one error before the rest is only counted.
_MAX_NAMED = 8


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """``{"layers/attn/q/kernel": (L, out, H), ...}`` of every parameter of the model, layers stacked on axis 0."""
    layers, hidden, vocab = config.num_layers, config.hidden_size, config.vocab_size
    widths = {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
    widths["v"] = widths["k"]
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (vocab, hidden), "norm/scale": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head/kernel"] = (vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {"input_norm/scale": (hidden,), "post_norm/scale": (hidden,)}
    layer["attn/o/kernel"] = (hidden, widths["q"])
    for name, width in widths.items():
        layer[f"attn/{name}/kernel"] = (width, hidden)
        if config.qkv_bias:
            layer[f"attn/{name}/bias"] = (width,)
    layer["router/kernel"] = (config.num_experts, hidden)
    if config.shared_size:
        layer["shared/gate_up"] = (2 * config.shared_size, hidden)
        layer["shared/down"] = (hidden, config.shared_size)
        layer["shared/gate"] = (1, hidden)
    layer["experts/gate_up"] = (config.num_experts, 2 * config.expert_size, hidden)
    layer["experts/down"] = (config.num_experts, hidden, config.expert_size)
    shapes |= {f"layers/{name}": (layers, *shape) for name, shape in layer.items()}
    return dict(sorted(shapes.items()))


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

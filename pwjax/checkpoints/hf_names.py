"""Hugging Face tensor names of every parameter: the one table that reading and writing share.

A parameter of one layer is the concatenation, along its output rows, of one or more checkpoint tensors. Orientation
is never guessed from sizes: with ``2 * I < H`` a wrong guess would load without an error.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

from pwjax.checkpoints.tree import EXPERTS, param_shapes
from pwjax.config import ModelConfig

_MODEL = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
}
# Names below `model.layers.{i}.`
_LAYER = {
    "input_norm/scale": ("input_layernorm.weight",),
    "post_norm/scale": ("post_attention_layernorm.weight",),
    **{f"attn/{p}/kernel": (f"self_attn.{p}_proj.weight",) for p in "qkvo"},
    **{f"attn/{p}/bias": (f"self_attn.{p}_proj.bias",) for p in "qkv"},
    "router/kernel": ("mlp.gate.weight",),
    "shared/gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "shared/down": ("mlp.shared_expert.down_proj.weight",),
    "shared/gate": ("mlp.shared_expert_gate.weight",),
}
_EXPERT = {"experts/gate_up": ("gate_proj.weight", "up_proj.weight"), "experts/down": ("down_proj.weight",)}
# One tensor for all experts of a layer, as transformers 5 holds them.
_FUSED = {"experts/gate_up": "mlp.experts.gate_up_proj", "experts/down": "mlp.experts.down_proj"}


class Part(NamedTuple):
    """One checkpoint tensor: its ``name``, its ``shape``, and ``index``, where it goes in its parameter."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...]


def parts(config: ModelConfig, param: str, layer: int | None, found: Container[str] = ()) -> list[Part]:
    """Checkpoint tensors of ``param`` (a flat name) in ``layer`` (None outside of layers), in file order.

    The fused name of routed experts is used where ``found``, the names in a checkpoint, has it.
    """
    shape = param_shapes(config)[param]
    if layer is None:
        return [Part(_MODEL[param], shape, ())]
    key, prefix, shape = param.removeprefix("layers/"), f"model.layers.{layer}.", shape[1:]
    if param not in EXPERTS:
        return list(_rows([prefix + name for name in _LAYER[key]], shape, ()))
    if prefix + _FUSED[key] in found:
        return [Part(prefix + _FUSED[key], shape, ())]
    return [
        part
        for expert in range(config.num_experts)
        for part in _rows([f"{prefix}mlp.experts.{expert}.{name}" for name in _EXPERT[key]], shape[1:], (expert,))
    ]


def all_parts(config: ModelConfig, found: Container[str] = ()) -> Iterator[tuple[str, int | None, list[Part]]]:
    """``(param, layer, parts)`` of the whole model: what is outside of layers first, then layer by layer."""
    names = list(param_shapes(config))
    for name in names:
        if not name.startswith("layers/"):
            yield name, None, parts(config, name, None, found)
    for layer in range(config.num_layers):
        for name in names:
            if name.startswith("layers/"):
                yield name, layer, parts(config, name, layer, found)


def empty_shared(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a shared expert of width 0, which transformers declares although they do nothing."""
    if config.shared_size:
        return {}
    hidden = config.hidden_size
    shapes = {"gate_proj": (0, hidden), "up_proj": (0, hidden), "down_proj": (hidden, 0)}
    out = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.shared_expert"
        out |= {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
        out[f"{prefix}_gate.weight"] = (1, hidden)
    return out


def _rows(names: list[str], shape: tuple[int, ...], before: tuple[int, ...]) -> Iterator[Part]:
    """Equal shares of the first axis of ``shape``, one a name."""
    share = shape[0] // len(names)
    for i, name in enumerate(names):
        yield Part(name, (share, *shape[1:]), (*before, slice(i * share, (i + 1) * share)))

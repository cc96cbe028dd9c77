"""Hugging Face tensor names of every parameter: the one table that reading and writing share.

A parameter of one layer is the concatenation, along its output rows, of one or more checkpoint tensors. Orientation
is never guessed from sizes: with ``2 * I < H`` a wrong guess would load without an error.
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from pwjax.checkpoints.source import stack_layers
from pwjax.checkpoints.tree import EXPERTS, param_shapes
from pwjax.config import ModelConfig

# Where the text model lies: in a checkpoint of its own, or inside a multimodal one.
_PREFIXES = ("model.", "model.language_model.")
_OUTER = {"embed/embedding": "embed_tokens.weight", "norm/scale": "norm.weight"}
_HEAD = "lm_head.weight"

# Tensors of multimodal checkpoints that no text meets.
_TOWERS = re.compile(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.")

_ATTENTION = {
    **{f"attn/{p}/kernel": [(f"self_attn.{p}_proj.weight",)] for p in "qkvo"},
    **{f"attn/{p}/bias": [(f"self_attn.{p}_proj.bias",)] for p in "qkv"},
}
_PRENORM = {
    "input_norm/scale": [("input_layernorm.weight",)],
    "post_norm/scale": [("post_attention_layernorm.weight",)],
}
# One tensor for all experts of a layer, as transformers 5 holds them.
_FUSED_GATE_UP, _FUSED_DOWN = ("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)
# Below `model.layers.{i}.`: every way in which a parameter can be stored, the hub's first. `{}` is an expert's number.
_LAYER: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "qwen2_moe": {
        **_ATTENTION,
        **_PRENORM,
        "router/kernel": [("mlp.gate.weight",)],
        "shared/gate_up": [("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")],
        "shared/down": [("mlp.shared_expert.down_proj.weight",)],
        "shared/gate": [("mlp.shared_expert_gate.weight",)],
        "experts/gate_up": [
            ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
            _FUSED_GATE_UP,
        ],
        "experts/down": [("mlp.experts.{}.down_proj.weight",), _FUSED_DOWN],
    },
    "mixtral": {
        **_ATTENTION,
        **_PRENORM,
        "router/kernel": [("block_sparse_moe.gate.weight",), ("mlp.gate.weight",)],
        "experts/gate_up": [
            ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
            _FUSED_GATE_UP,
        ],
        "experts/down": [("block_sparse_moe.experts.{}.w2.weight",), _FUSED_DOWN],
    },
    "gemma4_text": {
        **_ATTENTION,
        **{f"attn/{p}_norm/scale": [(f"self_attn.{p}_norm.weight",)] for p in "qk"},
        "input_norm/scale": [("input_layernorm.weight",)],
        "post_attn_norm/scale": [("post_attention_layernorm.weight",)],
        "mlp_norm/scale": [("pre_feedforward_layernorm.weight",)],
        "post_mlp_norm/scale": [("post_feedforward_layernorm_1.weight",)],
        "experts_norm/scale": [("pre_feedforward_layernorm_2.weight",)],
        "post_experts_norm/scale": [("post_feedforward_layernorm_2.weight",)],
        "post_norm/scale": [("post_feedforward_layernorm.weight",)],
        "layer_scalar": [("layer_scalar",)],
        "mlp/gate_up": [("mlp.gate_proj.weight", "mlp.up_proj.weight")],
        "mlp/down": [("mlp.down_proj.weight",)],
        "router/kernel": [("router.proj.weight",)],
        "router/scale": [("router.scale",)],
        "router/expert_scale": [("router.per_expert_scale",)],
        "experts/gate_up": [("experts.gate_up_proj",)],
        "experts/down": [("experts.down_proj",)],
    },
}


class Part(NamedTuple):
    """One checkpoint tensor: its ``name``, its ``shape``, and ``index``, where it goes in its parameter."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...]


class Names:
    """Checkpoint tensors of a model's parameters, as the checkpoint with the tensors ``found`` spells them.

    Without ``found``: as the hub has them, a text model by itself. ``embedding`` and ``head`` are two of the names.
    """

    def __init__(self, config: ModelConfig, found: Collection[str] = ()):
        self.config, self.found = config, frozenset(found)
        nested = any(name.startswith(_PREFIXES[1]) for name in self.found)
        self.prefix = _PREFIXES[nested]
        self.embedding, self.head = self.prefix + _OUTER["embed/embedding"], _HEAD
        self._shapes = param_shapes(config)

    def parts(self, param: str, layer: int | None) -> list[Part]:
        """Tensors of ``param`` (a flat name) in ``layer`` (its number in the model; None outside), in file order."""
        shape = self._shapes[param]
        if layer is None:
            return [Part(_HEAD if param == "lm_head/kernel" else self.prefix + _OUTER[param], shape, ())]
        prefix, shape = f"{self.prefix}layers.{layer}.", shape[1:]
        key = re.sub(r"^attn_\w+/", "attn/", param.removeprefix("layers/"))
        spellings = _LAYER[self.config.model_type][key]
        names = next((s for s in spellings if any(prefix + n.format(0) in self.found for n in s)), spellings[0])
        if param in EXPERTS and "{}" in names[0]:
            return [
                part
                for expert in range(self.config.num_experts)
                for part in _rows([prefix + name.format(expert) for name in names], shape[1:], (expert,))
            ]
        return list(_rows([prefix + name for name in names], shape, ()))

    def all_parts(self) -> Iterator[tuple[str, int | None, list[Part]]]:
        """``(param, layer, parts)`` of the whole model: what is outside of layers first, then layer by layer."""
        for name in self._shapes:
            if not name.startswith("layers/"):
                yield name, None, self.parts(name, None)
        stacks = {name: stack_layers(self.config, name) for name in self._shapes if name.startswith("layers/")}
        for layer in range(self.config.num_layers):
            for name, layers in stacks.items():
                if layer in layers:
                    yield name, layer, self.parts(name, layer)

    def skipped(self) -> list[str]:
        """Tensors found that belong to the vision and audio towers of a multimodal checkpoint."""
        if self.config.model_type != "gemma4_text":
            return []
        return sorted(name for name in self.found if _TOWERS.match(name))

    def empty_shared(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a shared expert of width 0, which transformers declares for qwen2_moe although it does nothing."""
        if self.config.shared_size or self.config.model_type != "qwen2_moe":
            return {}
        hidden = self.config.hidden_size
        shapes = {"gate_proj": (0, hidden), "up_proj": (0, hidden), "down_proj": (hidden, 0)}
        out = {}
        for layer in range(self.config.num_layers):
            prefix = f"{self.prefix}layers.{layer}.mlp.shared_expert"
            out |= {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
            out[f"{prefix}_gate.weight"] = (1, hidden)
        return out


def _rows(names: list[str], shape: tuple[int, ...], before: tuple[int, ...]) -> Iterator[Part]:
    """Equal shares of the first axis of ``shape``, one a name."""
    share = shape[0] // len(names)
    for i, name in enumerate(names):
        yield Part(name, (share, *shape[1:]), (*before, slice(i * share, (i + 1) * share)))

"""Gemma 4 with experts (Gemma-4-26B-A4B): sliding and full layers of different shape, norms everywhere, a softcap.

The checkpoint on the hub is multimodal; only its text model is read, and a text model is what is written.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np

from pwjax.config import AttentionKind, ModelConfig
from pwjax.errors import CheckpointError
from pwjax.families.fields import SIZES, read_fields, rope_parameters, special_tokens, write_fields

_FIELDS = {
    **SIZES,
    "num_experts": "num_experts",
    "top_k_experts": "top_k",
    "moe_intermediate_size": "expert_size",
    "intermediate_size": "mlp_size",
    "head_dim": "head_dim",
    "sliding_window": "window",
}
_ONLY = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "enable_moe_block": (True,),
    "attention_bias": (False, None),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
    # Text is causal under "vision" too.
    "use_bidirectional_attention": ("vision", None),
    "attention_k_eq_v": (True, False),
}
_HARMLESS = (
    "rope_parameters", "layer_types", "final_logit_softcapping", "global_head_dim", "num_global_key_value_heads",
    "per_layer_config", "vocab_size_per_layer_input",
)  # fmt: skip
# Fields of the multimodal wrapper that a text never meets.
_WRAPPER = ("text_config", "vision_config", "audio_config", "tie_word_embeddings", "vision_soft_tokens_per_image")
_TOKENS = ("boi_token", "eoi_token", "boa_token", "eoa_token", "image_token", "video_token", "audio_token")
_TYPES = ("sliding_attention", "full_attention")


def read_multimodal(data: Mapping) -> ModelConfig:
    """The text model in a ``config.json`` of type ``gemma4``."""
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("config.json lacks text_config")
    ids = {f"{token}_{end}" for token in _TOKENS for end in ("id", "index")}
    read_fields(data, {}, {}, {*_WRAPPER, *ids})
    # Where both levels name a value, the text model's counts; the wrapper knows more ids that end a text.
    outer = {key: data[key] for key in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id") if data.get(key)}
    inner = {key: value for key, value in text.items() if value is not None or key not in outer}
    return read({**outer, **inner, **{k: v for k, v in outer.items() if k == "eos_token_id"}})


def read(data: Mapping) -> ModelConfig:
    """The configuration in a ``config.json`` of type ``gemma4_text``, or the ``text_config`` of a ``gemma4``."""
    if not data.get("enable_moe_block"):
        raise CheckpointError("config.json: this Gemma 4 has no experts (enable_moe_block); allowed: models that do")
    values: dict[str, Any] = read_fields(data, _FIELDS, _ONLY, _HARMLESS)
    if data.get("hidden_size_per_layer_input") is None:
        raise CheckpointError("config.json lacks hidden_size_per_layer_input")
    types, rope = _layer_types(data), _rope(data)
    values["pattern"] = _pattern([_TYPES.index(t) for t in types])
    softcap = data.get("final_logit_softcapping")
    return ModelConfig(
        model_type="gemma4_text", rope_theta=float(rope["sliding_attention"]["rope_theta"]), shared_size=0,
        norm_topk_prob=True, qkv_bias=False, activation="gelu_pytorch_tanh", query_scale=1.0, qk_norm=True,
        softcap=None if softcap is None else float(softcap), embed_scale=_embed_scale(data),
        other_kinds=(_full_kind(data, types, rope["full_attention"]),), **special_tokens(data), **values,
    )  # fmt: skip


def write(config: ModelConfig) -> dict:
    """Inverse of :func:`read`."""
    full = config.other_kinds[0]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": full.rope_theta, "partial_rotary_factor": full.rope_fraction,
        },
    }  # fmt: skip
    rounded = float(np.float32(ml_dtypes.bfloat16(config.embed_scale))) == config.embed_scale
    return {
        **write_fields(config, "Gemma4ForCausalLM", _FIELDS),
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "torch_dtype": "bfloat16" if rounded else "float32",
        "layer_types": [_TYPES[kind] for kind in config.layer_kinds],
        "rope_parameters": rope,
        "attention_k_eq_v": full.k_eq_v,
        "attention_bias": False,
        "enable_moe_block": True,
        "hidden_activation": config.activation,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "final_logit_softcapping": config.softcap,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }


def _layer_types(data: Mapping) -> list[str]:
    """``layer_types`` as transformers understands it: five sliding layers, then a full one; the last is full."""
    depth = data["num_hidden_layers"]
    types = list(data.get("layer_types") or [_TYPES[(layer + 1) % 6 == 0] for layer in range(depth)])
    types[-1:] = ["full_attention"]
    if len(types) != depth or set(types) != set(_TYPES):
        choices = " and ".join(map(repr, _TYPES))
        raise CheckpointError(f"config.json: layer_types must be {depth} entries, both {choices}, got {types}")
    return types


def _pattern(kinds: list[int]) -> tuple[int, ...]:
    """The shortest pattern that repeats to ``kinds``."""
    period = next(p for p in count(1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return tuple(kinds[:period])


def _rope(data: Mapping) -> dict[str, Mapping]:
    """Checked positions of both types of layers; what is not given is transformers' default."""
    defaults = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    given = data.get("rope_parameters") or defaults
    out = {}
    for name, known in zip(_TYPES, (("default",), ("default", "proportional")), strict=True):
        rope = given.get(name) or defaults[name]
        unknown = sorted(set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor"})
        if unknown:
            raise CheckpointError(f"config.json: {unknown[0]} of the positions of {name} is not supported")
        out[name] = rope_parameters(rope, known)
    return out


def _full_kind(data: Mapping, types: list[str], rope: Mapping) -> AttentionKind:
    """Attention of the full layers: ``global_*`` fields, or overrides a layer as transformers 5 writes them."""
    k_eq_v = bool(data.get("attention_k_eq_v", False))
    overrides = data.get("per_layer_config")
    if overrides is None:
        kv_heads = data.get("num_global_key_value_heads") if k_eq_v else None
        shape = {"head_dim": data.get("global_head_dim", 512), "num_key_value_heads": kv_heads}
    else:
        layers = {int(layer): value for layer, value in overrides.items()}
        full = [layer for layer, name in enumerate(types) if name == "full_attention"]
        shape = layers.get(full[0], {})
        known = set(shape) <= {"head_dim", "num_key_value_heads"}
        if not known or sorted(layers) != full or any(other != shape for other in layers.values()):
            raise CheckpointError(f"config.json: per_layer_config {dict(overrides)} is not supported")
    return AttentionKind(
        name="full", head_dim=shape.get("head_dim") or data["head_dim"],
        kv_heads=shape.get("num_key_value_heads") or data["num_key_value_heads"], k_eq_v=k_eq_v,
        rope_theta=float(rope["rope_theta"]),
        rope_fraction=float(rope.get("partial_rotary_factor", 1.0)) if rope.get("rope_type") == "proportional" else 1.0,
    )  # fmt: skip


def _embed_scale(data: Mapping) -> float:
    """``hidden_size ** 0.5`` in the type of the weights: bfloat16 weights see 53.0 where float32 ones see 53.07."""
    dtype = data.get("dtype") or data.get("torch_dtype") or "bfloat16"
    scale = np.float32(data["hidden_size"] ** 0.5)
    return float(scale if dtype == "float32" else np.float32(ml_dtypes.bfloat16(scale)))

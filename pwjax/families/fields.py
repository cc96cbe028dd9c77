"""Reading the fields of a ``config.json``: everything is required, allowed, known to be harmless, or an error."""

from collections.abc import Iterable, Mapping
from typing import Any

from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError

# Fields that say nothing about the numbers of the forward pass.
HARMLESS = {
    "architectures", "auto_map", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "model_type", "output_router_logits", "pad_token_id", "router_aux_loss_coef", "torch_dtype",
    "transformers_version", "use_cache", "_name_or_path", "chunk_size_feed_forward", "id2label", "label2id",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "tokenizer_class",
}  # fmt: skip
# Names that all families share.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "rms_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_embeddings",
}


def read_fields(
    data: Mapping, fields: Mapping[str, str], only: Mapping[str, tuple], harmless: Iterable[str] = ()
) -> dict[str, Any]:
    """``{our name: value}`` of ``fields`` (config.json's name to ours).

    ``only`` are fields that may be absent but, where present, must have one of the given values; ``harmless`` are
    read past, as are :data:`HARMLESS`. CheckpointError names whatever is missing, refused or unknown.
    """
    for key, allowed in only.items():
        if key in data and data[key] not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise CheckpointError(f"config.json: {key} = {data[key]!r} is not supported; allowed: {choices}")
    missing = [key for key in fields if data.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    unknown = sorted(set(data) - {*fields, *only, *harmless, *HARMLESS})
    if unknown:
        raise CheckpointError(
            f"config.json has fields this version does not understand: {', '.join(unknown)}; "
            "they may change the numbers, so they are not ignored"
        )
    return {name: data[key] for key, name in fields.items()}


def rope_theta(data: Mapping) -> float:
    """Base of plain rotary positions, in the old spelling or the new; CheckpointError for other types of positions."""
    return float(rope_parameters({**data, **(data.get("rope_parameters") or {})})["rope_theta"])


def rope_parameters(data: Mapping, types: tuple[str, ...] = ("default",)) -> Mapping:
    """``data`` with a known ``rope_type`` and a ``rope_theta``; CheckpointError for any other."""
    kind = data.get("rope_type", "default")
    if kind not in types:
        choices = ", ".join(map(repr, types))
        raise CheckpointError(f"config.json: rope_type {kind!r} is not supported; allowed: {choices}")
    if data.get("rope_theta") is None:
        raise CheckpointError("config.json lacks rope_theta")
    return data


def head_dim(data: Mapping) -> int:
    """``head_dim``, which follows from the sizes where it is not given."""
    return data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"]


def special_tokens(data: Mapping) -> dict[str, Any]:
    """The ids that begin and end a text, as fields of :class:`ModelConfig`."""
    eos = data.get("eos_token_id")
    ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return {"eos_token_ids": ids, "bos_token_id": data.get("bos_token_id")}


def write_fields(config: ModelConfig, architecture: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """The part of ``config.json`` that all families write alike."""
    eos = config.eos_token_ids
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        **{key: getattr(config, name) for key, name in fields.items()},
        "head_dim": config.head_dim,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "bos_token_id": config.bos_token_id,
        "torch_dtype": "bfloat16",
    }

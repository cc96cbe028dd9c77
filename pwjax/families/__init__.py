"""The model families as Hugging Face spells them: ``config.json`` in and out, one module a family."""

from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError
from pwjax.families import gemma4, mixtral, qwen2_moe

_READERS = {
    "qwen2_moe": qwen2_moe.read,
    "mixtral": mixtral.read,
    "gemma4": gemma4.read_multimodal,
    "gemma4_text": gemma4.read,
}
_WRITERS = {"qwen2_moe": qwen2_moe.write, "mixtral": mixtral.write, "gemma4_text": gemma4.write}
MODEL_TYPES = tuple(_READERS)


def read_config(data: dict) -> ModelConfig:
    """The configuration that a ``config.json`` dictionary describes.

    CheckpointError for an unknown model type, a missing field, or a field that is not understood.
    """
    model_type = data.get("model_type")
    if model_type not in _READERS:
        known = ", ".join(MODEL_TYPES)
        raise CheckpointError(f"unknown model type {model_type!r} in config.json; this version reads {known}")
    return _READERS[model_type](data)


def write_config(config: ModelConfig) -> dict:
    """The ``config.json`` dictionary of a text model, which transformers and :func:`read_config` read."""
    if config.model_type not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise CheckpointError(f"unknown model type {config.model_type!r}; this version writes {known}")
    return _WRITERS[config.model_type](config)

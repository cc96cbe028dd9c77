"""Configurations of three published models, for planning without a download; only ``config.json``, no weights."""

import json
from importlib import resources

from pwjax.config import ModelConfig
from pwjax.errors import UsageError

# What is not taken from the published configuration but is the default of transformers' class for it.
NOTES = {
    "qwen1.5-moe-a2.7b": "the longest context (32768 tokens) and the end tokens are the defaults of transformers",
    "mixtral-8x7b": "the longest context (131072 tokens) and the special tokens are the defaults of transformers",
    "gemma-4-26b-a4b": "the text model alone, without a vision tower; special tokens are the defaults of transformers",
}
PRESETS = tuple(NOTES)


def preset(name: str) -> ModelConfig:
    """The configuration of a published model; UsageError for a name that is not in ``PRESETS``."""
    if name not in NOTES:
        raise UsageError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}")
    text = (resources.files("pwjax") / "data" / "presets" / f"{name}.json").read_text("utf-8")
    return ModelConfig.from_hf(json.loads(text))

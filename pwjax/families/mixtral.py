"""Mixtral: no biases, no shared expert, gates always renormalized although no field says so; a window if given."""

from collections.abc import Mapping

from pwjax.config import ModelConfig
from pwjax.families.fields import SIZES, head_dim, read_fields, rope_theta, special_tokens, write_fields

_FIELDS = {
    **SIZES,
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "intermediate_size": "expert_size",
}
_ONLY = {"hidden_act": ("silu",), "rope_scaling": (None,)}
# The router's noise is for training.
_HARMLESS = ("head_dim", "rope_theta", "rope_parameters", "sliding_window", "router_jitter_noise")


def read(data: Mapping) -> ModelConfig:
    """The configuration in a ``config.json`` of type ``mixtral``."""
    return ModelConfig(
        model_type="mixtral", **read_fields(data, _FIELDS, _ONLY, _HARMLESS), head_dim=head_dim(data),
        rope_theta=rope_theta(data), window=data.get("sliding_window"), shared_size=0, norm_topk_prob=True,
        qkv_bias=False, **special_tokens(data),
    )  # fmt: skip


def write(config: ModelConfig) -> dict:
    """Inverse of :func:`read`."""
    return {
        **write_fields(config, "MixtralForCausalLM", _FIELDS),
        "rope_theta": config.rope_theta,
        "hidden_act": config.activation,
        "sliding_window": config.window,
    }

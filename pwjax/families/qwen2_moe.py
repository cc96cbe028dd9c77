"""Qwen2-MoE (Qwen1.5-MoE-A2.7B): biased q, k and v, a gated shared expert, gates renormalized only where asked for."""

from collections.abc import Mapping

from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError
from pwjax.families.fields import SIZES, head_dim, read_fields, rope_theta, special_tokens, write_fields

_FIELDS = {
    **SIZES,
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_size",
    "shared_expert_intermediate_size": "shared_size",
    "norm_topk_prob": "norm_topk_prob",
}
_ONLY = {
    "hidden_act": ("silu",),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "attention_bias": (True, None),
    "qkv_bias": (True, False),
}
# Widths of layers without experts, which a supported model does not have, and of a window that is not in use.
_HARMLESS = (
    "head_dim", "rope_theta", "rope_parameters", "layer_types", "intermediate_size", "sliding_window",
    "max_window_layers",
)  # fmt: skip


def read(data: Mapping) -> ModelConfig:
    """The configuration in a ``config.json`` of type ``qwen2_moe``."""
    values = read_fields(data, _FIELDS, _ONLY, _HARMLESS)
    if set(data.get("layer_types") or ()) - {"full_attention"}:
        raise CheckpointError("config.json: layer_types other than 'full_attention' are not supported")
    return ModelConfig(
        model_type="qwen2_moe", head_dim=head_dim(data), rope_theta=rope_theta(data),
        qkv_bias=data.get("qkv_bias", True), **special_tokens(data), **values,
    )  # fmt: skip


def write(config: ModelConfig) -> dict:
    """Inverse of :func:`read`."""
    return {
        **write_fields(config, "Qwen2MoeForCausalLM", _FIELDS),
        "rope_theta": config.rope_theta,
        "hidden_act": config.activation,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "intermediate_size": config.shared_size,
        "qkv_bias": config.qkv_bias,
        "use_sliding_window": False,
    }

"""The layer of Qwen2-MoE and Mixtral: norms before attention and before the experts, and maybe a shared expert."""

import jax

from pwjax.models.layers import attention, gated_mlp, linear, rms_norm
from pwjax.models.moe import route, routed_experts


def layer(config, kind, params, x, positions, valid, attend, paged, bump):
    """See :func:`pwjax.models.layer.decoder_layer`; ``valid`` bool[B * T]."""
    h = rms_norm(x, params["input_norm"]["scale"], config.rms_eps)
    attended, kept = attention(config, kind, params["attn"], h, positions, attend)
    x = x + attended
    h = rms_norm(x, params["post_norm"]["scale"], config.rms_eps).reshape(-1, config.hidden_size)
    routing = route(config, params["router"], h)
    y, trace, stats = routed_experts(config, params, h, valid, routing, paged, bump)
    if "shared" in params:
        # Every token passes it, scaled by its own sigmoid gate.
        y = y + jax.nn.sigmoid(linear(h, params["shared"]["gate"])) * gated_mlp(config, h, params["shared"])
    return x + y.reshape(x.shape), trace, stats, kept

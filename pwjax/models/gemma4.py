"""The layer of Gemma 4: norms on both sides of attention, and a dense MLP beside the routed experts.

Router and experts read the residual, each through its own norm; the sum of both halves is normed once more, and a
scalar of the layer multiplies everything.
"""

from pwjax.models.layers import as_float, attention, gated_mlp, rms_norm
from pwjax.models.moe import route_scaled, routed_experts


def layer(config, kind, params, x, positions, valid, attend, paged, bump):
    """See :func:`pwjax.models.layer.decoder_layer`; ``valid`` bool[B * T]."""

    def norm(name, value):
        return rms_norm(value, params[name]["scale"], config.rms_eps)

    attended, kept = attention(config, kind, params["attn"], norm("input_norm", x), positions, attend)
    x = x + norm("post_attn_norm", attended)
    dense = norm("post_mlp_norm", gated_mlp(config, norm("mlp_norm", x), params["mlp"]))
    flat = x.reshape(-1, config.hidden_size)
    routing = route_scaled(config, params["router"], flat)
    y, trace, stats = routed_experts(config, params, norm("experts_norm", flat), valid, routing, paged, bump)
    both = dense + norm("post_experts_norm", y).reshape(x.shape)
    return (x + norm("post_norm", both)) * as_float(params["layer_scalar"]), trace, stats, kept

"""Names and shapes of all parameters of a model: the one table that models, checkpoints and artifacts share."""

from pwjax.config import AttentionKind, ModelConfig

# Norms of a layer: before attention, before the experts.
NORMS = ("input_norm", "post_norm")
# Gemma 4: before and after attention; before and after the dense MLP; before and after the experts; after their sum.
GEMMA_NORMS = (
    "input_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "experts_norm", "post_experts_norm", "post_norm",
)  # fmt: skip


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """``{"layers/attn/q/kernel": (L, out, H), ...}`` of every parameter of the model, layers stacked on axis 0.

    Attention lies under ``layers/attn`` where all layers are of one kind, else under ``layers/attn_NAME`` with the
    layers of that kind only, in order.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (vocab, hidden), "norm/scale": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head/kernel"] = (vocab, hidden)
    shapes |= {f"layers/{name}": (config.num_layers, *shape) for name, shape in layer_shapes(config).items()}
    for kind, layers in zip(config.attention_kinds, config.kind_layers, strict=True):
        group = config.attention_group(kind)
        shapes |= {f"layers/{group}/{n}": (len(layers), *s) for n, s in attention_shapes(config, kind).items()}
    return dict(sorted(shapes.items()))


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters that all layers have alike, by their name in a layer."""
    hidden, experts, size = config.hidden_size, config.num_experts, config.expert_size
    norms = GEMMA_NORMS if config.mlp_size else NORMS
    shapes: dict[str, tuple[int, ...]] = {f"{name}/scale": (hidden,) for name in norms}
    shapes["router/kernel"] = (experts, hidden)
    shapes["experts/gate_up"] = (experts, 2 * size, hidden)
    shapes["experts/down"] = (experts, hidden, size)
    if config.shared_size:
        shapes["shared/gate_up"] = (2 * config.shared_size, hidden)
        shapes["shared/down"] = (hidden, config.shared_size)
        shapes["shared/gate"] = (1, hidden)
    if config.mlp_size:
        shapes["mlp/gate_up"] = (2 * config.mlp_size, hidden)
        shapes["mlp/down"] = (hidden, config.mlp_size)
        shapes["router/scale"] = (hidden,)
        shapes["router/expert_scale"] = (experts,)
        shapes["layer_scalar"] = (1,)
    return shapes


def attention_shapes(config: ModelConfig, kind: AttentionKind) -> dict[str, tuple[int, ...]]:
    """Parameters of the attention of one layer of a kind."""
    widths = {"q": config.num_heads * kind.head_dim, "k": kind.kv_heads * kind.head_dim}
    if not kind.k_eq_v:
        widths["v"] = widths["k"]
    shapes: dict[str, tuple[int, ...]] = {"o/kernel": (config.hidden_size, widths["q"])}
    for name, width in widths.items():
        shapes[f"{name}/kernel"] = (width, config.hidden_size)
        if config.qkv_bias:
            shapes[f"{name}/bias"] = (width,)
    if config.qk_norm:
        shapes |= {f"{name}_norm/scale": (kind.head_dim,) for name in "qk"}
    return shapes

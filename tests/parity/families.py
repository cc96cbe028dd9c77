"""Tiny random transformers models of each family, their checkpoint directories and logits.

``build(family, **changes)`` makes one; ``save`` writes it as ``save_pretrained`` does; ``logits`` is the reference.
Weights are wide enough that a wrong name, order or switch shows in the logits.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 40
_COMMON = dict(
    vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    num_experts_per_tok=2, max_position_embeddings=512, eos_token_id=0, bos_token_id=None, pad_token_id=None,
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": dict(
        num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=12, intermediate_size=24,
        norm_topk_prob=False, rms_norm_eps=1e-6,
    ),
    "mixtral": dict(num_local_experts=4, intermediate_size=8, rms_norm_eps=1e-5, num_key_value_heads=2, head_dim=4),
    # Two periods of one sliding and one full layer; the window is short, so that 300 positions go far past it.
    "gemma4": dict(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=16, num_experts=4, top_k_experts=2,
        moe_intermediate_size=8, intermediate_size=12, enable_moe_block=True, hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}  # fmt: skip
FAMILIES = tuple(SETTINGS)


def build(family: str, seed: int = 0, multimodal: bool = False, **changes):
    """A random causal language model in float32, in eval mode, with values that bfloat16 holds exactly.

    ``multimodal`` (gemma4 only) wraps the text model with a small vision tower, as the hub's checkpoint has it.
    """
    import torch
    import transformers as hf

    settings = {**_COMMON, **SETTINGS[family], **changes, "attn_implementation": "eager"}
    if family == "gemma4":
        del settings["num_experts_per_tok"]
        text = hf.Gemma4TextConfig(**settings)
        if multimodal:
            text.pad_token_id = 0  # the wrapper replaces image tokens by it
            vision = hf.Gemma4VisionConfig(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, head_dim=8, position_embedding_size=16,
            )  # fmt: skip
            config = hf.Gemma4Config(
                text_config=text, vision_config=vision, image_token_id=VOCAB - 1, video_token_id=VOCAB - 2,
                audio_token_id=VOCAB - 3, attn_implementation="eager",
            )  # fmt: skip
            model = hf.Gemma4ForConditionalGeneration(config)
        else:
            model = hf.Gemma4ForCausalLM(text)
    elif family == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**settings))
    else:
        model = hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        values = dict(model.named_parameters())
        values |= {name: b for name, b in model.named_buffers() if name.endswith("layer_scalar")}
        for name, value in values.items():
            wide = torch.randn(value.shape, generator=generator) * (0.2 if value.ndim > 1 else 0.3)
            # Scales lie around 1, or the model would say nothing.
            scale = "norm" in name or name.endswith(("scale", "layer_scalar"))
            value.copy_((wide + scale).to(torch.bfloat16))
    return model.eval()


def save(model, folder: str | Path, dtype: str = "bfloat16", **options) -> Path:
    """Write the checkpoint as ``save_pretrained`` does; a copy is rounded, for the model's own tables must not be."""
    import torch

    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return Path(folder)


def logits(model, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float32[B, T, V] of right-padded ``tokens`` int32[B, T]."""
    import torch

    mask = torch.arange(tokens.shape[1])[None] < torch.tensor(np.asarray(lengths))[:, None]
    with torch.no_grad():
        out = model(torch.tensor(tokens, dtype=torch.long), attention_mask=mask.long(), use_cache=False)
    return out.logits.float().numpy()

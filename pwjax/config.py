"""Model facts read from a Hugging Face ``config.json``: one frozen dataclass, unknown numerics refused."""

import dataclasses
from dataclasses import dataclass

from pwjax.errors import CheckpointError

MODEL_TYPES = ("qwen2_moe",)

# Fields that say nothing about the numbers of the forward pass, or whose only understood value is given.
_IGNORED = {
    "architectures", "auto_map", "attention_dropout", "bos_token_id", "decoder_sparse_step", "dtype", "eos_token_id",
    "initializer_range", "max_window_layers", "model_type", "output_router_logits", "pad_token_id",
    "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
    "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "tokenizer_class", "intermediate_size", "sliding_window",
}  # fmt: skip
_ONLY = {
    "hidden_act": ("silu",),
    "mlp_only_layers": ([], None),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "attention_bias": (True, None),
    "qkv_bias": (True, False),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and numeric switches of one MoE decoder.

    ``expert_size`` and ``shared_size`` are the intermediate widths of a routed and of the shared expert
    (0 = no shared expert); ``max_positions`` bounds prompt plus generated tokens.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int
    norm_topk_prob: bool
    rms_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is int}
        bad = [f"{k}={v}" for k, v in sizes.items() if v < (0 if k == "shared_size" else 1)]
        if bad:
            raise CheckpointError(f"the model config has sizes that cannot be: {', '.join(bad)}; they must be positive")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                "num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.top_k > self.num_experts:
            raise CheckpointError(f"num_experts_per_tok is {self.top_k}, but there are only {self.num_experts} experts")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def blocks(self) -> int:
        """Paged blocks: two a routed expert."""
        return self.num_layers * self.num_experts * 2

    @property
    def expert_params(self) -> int:
        """Weights in all routed experts."""
        return self.num_layers * self.num_experts * 3 * self.hidden_size * self.expert_size

    def kv_row_words(self, dtype_bytes: int) -> int:
        """uint32 words of K (or V) of one token in one layer."""
        return -(-self.num_kv_heads * self.head_dim * dtype_bytes // 4)

    @classmethod
    def from_hf(cls, data: dict) -> "ModelConfig":
        """Read a ``config.json`` dictionary.

        Raises CheckpointError for an unknown model type, a missing field, or a field that changes
        numerics and is not understood.
        """
        model_type = data.get("model_type")
        if model_type not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise CheckpointError(f"unknown model type {model_type!r} in config.json; this version reads {known}")
        for key, allowed in _ONLY.items():
            if key in data and data[key] not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise CheckpointError(f"config.json: {key} = {data[key]!r} is not supported; allowed: {choices}")
        if data.get("decoder_sparse_step", 1) != 1:
            step = data["decoder_sparse_step"]
            raise CheckpointError(f"config.json: decoder_sparse_step = {step!r} is not supported; allowed: 1")
        rope = data.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"config.json: rope_type {rope['rope_type']!r} is not supported; allowed: 'default'")
        layer_types = data.get("layer_types")
        if layer_types and set(layer_types) != {"full_attention"}:
            raise CheckpointError("config.json: layer_types other than 'full_attention' are not supported")
        missing = [key for key in _FIELDS if key not in data and key not in ("head_dim", "rope_theta")]
        theta = data.get("rope_theta", rope.get("rope_theta"))
        if missing or theta is None:
            missing += ["rope_theta"] * (theta is None)
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        known = {*_FIELDS, *_IGNORED, *_ONLY, "rope_parameters", "layer_types"}
        unknown = sorted(set(data) - known)
        if unknown:
            raise CheckpointError(
                f"config.json has fields this version does not understand: {', '.join(unknown)}; "
                "they may change the numbers, so they are not ignored"
            )
        eos = data.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        values = {name: data[key] for key, name in _FIELDS.items() if key in data}
        values.setdefault("head_dim", data["hidden_size"] // data["num_attention_heads"])
        values["rope_theta"] = float(theta)
        return cls(
            model_type=model_type,
            qkv_bias=data.get("qkv_bias", True),
            eos_token_ids=eos_ids,
            bos_token_id=data.get("bos_token_id"),
            **values,
        )

    def to_hf(self) -> dict:
        """The ``config.json`` dictionary that transformers and :meth:`from_hf` read."""
        data = {key: getattr(self, name) for key, name in _FIELDS.items()}
        eos = self.eos_token_ids
        return {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": self.model_type,
            **data,
            "hidden_act": "silu",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "intermediate_size": self.shared_size,
            "qkv_bias": self.qkv_bias,
            "use_sliding_window": False,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "bos_token_id": self.bos_token_id,
            "torch_dtype": "bfloat16",
        }

    def to_json(self) -> dict:
        """Plain dictionary for the manifest."""
        return {**dataclasses.asdict(self), "eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_json(cls, data: dict) -> "ModelConfig":
        """Inverse of :meth:`to_json`; CheckpointError where fields are missing or unknown."""
        try:
            return cls(**{**data, "eos_token_ids": tuple(data["eos_token_ids"])})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the stored model config is not readable: {error}") from error


_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_size",
    "shared_expert_intermediate_size": "shared_size",
    "norm_topk_prob": "norm_topk_prob",
    "rms_norm_eps": "rms_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_embeddings",
}

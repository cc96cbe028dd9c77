"""The model's configuration: one frozen dataclass for all families; what a family adds is in ``pwjax.families``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pwjax.errors import CheckpointError

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """Attention of one kind of layers.

    ``name`` (unique in a model); ``head_dim`` and ``kv_heads``; ``window`` tokens that a query sees, itself included
    (None: all); ``rope_theta``, and ``rope_fraction``, the share of frequencies that rotate ("proportional": the
    lowest frequencies stand still); ``k_eq_v``: values are the key projection before its norm and rotation.
    """

    name: str
    head_dim: int
    kv_heads: int
    rope_theta: float
    window: int | None = None
    rope_fraction: float = 1.0
    k_eq_v: bool = False

    def row_words(self, dtype_bytes: int) -> int:
        """uint32 words of K (or V) of one token in one layer."""
        return -(-self.kv_heads * self.head_dim * dtype_bytes // 4)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and numeric switches of one MoE decoder.

    ``expert_size``, ``shared_size`` and ``mlp_size`` are the intermediate widths of a routed expert, of the shared
    expert and of the dense MLP beside the experts (0 = none); ``max_positions`` bounds prompt plus generated tokens.
    ``num_kv_heads``, ``head_dim``, ``rope_theta`` and ``window`` describe the first kind of attention, ``other_kinds``
    the rest, and ``pattern`` the kind of each layer, repeated over the depth. ``query_scale`` None is
    ``head_dim ** -0.5``; ``qk_norm`` norms queries and keys (with scales) and values (without); ``softcap`` bounds the
    final logits; ``embed_scale`` multiplies embeddings. Raises CheckpointError for values that cannot be.
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
    activation: str = "silu"
    mlp_size: int = 0
    window: int | None = None
    other_kinds: tuple[AttentionKind, ...] = ()
    pattern: tuple[int, ...] = (0,)
    query_scale: float | None = None
    qk_norm: bool = False
    softcap: float | None = None
    embed_scale: float = 1.0

    def __post_init__(self):
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is int}
        optional = ("shared_size", "mlp_size")
        bad = [f"{k}={v}" for k, v in sizes.items() if v < (0 if k in optional else 1)]
        for kind in self.attention_kinds:
            values = {"head_dim": kind.head_dim, "kv_heads": kind.kv_heads, "window": kind.window}
            bad += [f"{kind.name} {k}={v}" for k, v in values.items() if v is not None and v < 1 and k not in sizes]
        if bad:
            raise CheckpointError(f"the model config has sizes that cannot be: {', '.join(bad)}; they must be positive")
        for kind in self.attention_kinds:
            if self.num_heads % kind.kv_heads:
                raise CheckpointError(
                    "num_attention_heads must be a multiple of num_key_value_heads, "
                    f"got {self.num_heads} and {kind.kv_heads}"
                )
            if kind.head_dim % 2:
                raise CheckpointError(f"head_dim must be even for rotary positions, got {kind.head_dim}")
        if self.top_k > self.num_experts:
            raise CheckpointError(f"num_experts_per_tok is {self.top_k}, but there are only {self.num_experts} experts")
        if self.activation not in ACTIVATIONS:
            raise CheckpointError(f"unknown activation {self.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        names = [kind.name for kind in self.attention_kinds]
        if not self.pattern or not set(self.pattern) <= set(range(len(names))) or len(set(names)) != len(names):
            raise CheckpointError(f"the layer pattern {self.pattern} does not fit the attention kinds {names}")

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """All kinds of attention; layers name them by index, see :attr:`layer_kinds`."""
        first = AttentionKind(
            name="full" if self.window is None else "sliding", head_dim=self.head_dim, kv_heads=self.num_kv_heads,
            rope_theta=self.rope_theta, window=self.window,
        )  # fmt: skip
        return (first, *self.other_kinds)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Index into :attr:`attention_kinds` of every layer."""
        return tuple(self.pattern[layer % len(self.pattern)] for layer in range(self.num_layers))

    @property
    def kind_layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each kind, in order."""
        kinds = self.layer_kinds
        return tuple(tuple(n for n, k in enumerate(kinds) if k == i) for i in range(len(self.attention_kinds)))

    def attention_group(self, kind: AttentionKind) -> str:
        """Name of the attention parameters of a kind in the tree of layers."""
        return f"attn_{kind.name}" if self.other_kinds else "attn"

    @property
    def blocks(self) -> int:
        """Paged blocks: two a routed expert."""
        return self.num_layers * self.num_experts * 2

    @property
    def expert_params(self) -> int:
        """Weights in all routed experts."""
        return self.num_layers * self.num_experts * 3 * self.hidden_size * self.expert_size

    def kv_row_words(self, dtype_bytes: int) -> int:
        """uint32 words of the widest K (or V) row of one token in one layer."""
        return max(kind.row_words(dtype_bytes) for kind in self.attention_kinds)

    @classmethod
    def from_hf(cls, data: dict) -> "ModelConfig":
        """Read a ``config.json`` dictionary.

        Raises CheckpointError for an unknown model type, a missing field, or a field that changes
        numerics and is not understood.
        """
        from pwjax.families import read_config

        return read_config(data)

    def to_hf(self) -> dict:
        """The ``config.json`` dictionary that transformers and :meth:`from_hf` read."""
        from pwjax.families import write_config

        return write_config(self)

    def to_json(self) -> dict:
        """Plain dictionary for the manifest."""
        lists = {name: list(getattr(self, name)) for name in ("eos_token_ids", "pattern")}
        return {**dataclasses.asdict(self), **lists, "other_kinds": [dataclasses.asdict(k) for k in self.other_kinds]}

    @classmethod
    def from_json(cls, data: Mapping) -> "ModelConfig":
        """Inverse of :meth:`to_json`; CheckpointError where fields are missing or unknown."""
        try:
            lists = {name: tuple(data[name]) for name in ("eos_token_ids", "pattern") if name in data}
            kinds = tuple(AttentionKind(**kind) for kind in data.get("other_kinds", ()))
            return cls(**{**data, **lists, "other_kinds": kinds})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the stored model config is not readable: {error}") from error

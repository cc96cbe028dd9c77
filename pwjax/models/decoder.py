"""The decoder: one Flax module for training, calibration and compiled steps, layers scanned.

The module only declares parameters; the mathematics is in pure functions. Its two forms are *dense* (whole expert
weights among the parameters; trainable, the oracle) and *paged* (experts read through a page table).

Shapes: B sequences (or slots), T tokens of this call, F tokens of this dispatch (``F >= T``), L layers.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import Past, paged_attention
from pwjax.config import ModelConfig
from pwjax.models.layers import as_float, linear, rms_norm, rotate
from pwjax.models.moe import Paged, RoutingStats, moe

# Parts in which a head that must be converted is multiplied.
HEAD_PARTS = 8


class Fresh(NamedTuple):
    """KV of the tokens of one dispatch, before they are committed to pages.

    ``k``, ``v`` [L, B, F, kv_heads, D] in the cache dtype; ``filled`` int32[]: tokens already present.
    """

    k: jax.Array
    v: jax.Array
    filled: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, tokens: int, dtype: Any = jnp.float32) -> "Fresh":
        """Room for ``tokens`` tokens of ``batch`` sequences."""
        shape = (config.num_layers, batch, tokens, config.num_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))


class Output(NamedTuple):
    """Result of a forward: final-norm ``hidden`` float32[B, T, H], ``fresh`` KV, ``stats`` [L, ...]."""

    hidden: jax.Array
    fresh: Fresh
    stats: RoutingStats


class DecoderLayer(nn.Module):
    """Attention and MoE of one layer, scanned over layers by :class:`Decoder`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, carry, scanned, positions, valid, filled, past, paged):  # noqa: D102
        config, (x, layer) = self.config, carry
        fresh_k, fresh_v, bits, pages = scanned
        batch, length, hidden = x.shape
        params = _declare_layer(self, config, dense=paged is None)

        h = rms_norm(x, params["input_norm"]["scale"], config.rms_eps)
        q, k, v = (
            linear(h, p["kernel"], p.get("bias")).reshape(batch, length, -1, config.head_dim)
            for p in (params["attn"][name] for name in "qkv")
        )
        q = rotate(q, positions, config.rope_theta) * config.head_dim**-0.5
        k = rotate(k, positions, config.rope_theta)
        # Rounded to the cache dtype before attention reads them: chunk sizes then change nothing.
        fresh_k = lax.dynamic_update_slice_in_dim(fresh_k, k.astype(fresh_k.dtype), filled, axis=1)
        fresh_v = lax.dynamic_update_slice_in_dim(fresh_v, v.astype(fresh_v.dtype), filled, axis=1)
        attended = paged_attention(q, fresh_k, fresh_v, filled, past, layer)
        x = x + linear(attended, params["attn"]["o"]["kernel"])

        h = rms_norm(x, params["post_norm"]["scale"], config.rms_eps).reshape(batch * length, hidden)
        local = None if paged is None else dataclasses.replace(paged, bits=bits, pages=pages)
        y, stats = moe(h, valid.reshape(-1), params, config, local)
        return (x + y.reshape(x.shape), layer + 1), (fresh_k, fresh_v, stats)


class Decoder(nn.Module):
    """Embedding, scanned layers, final norm; the head is :func:`logits`, so that only wanted rows are computed."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        valid: jax.Array,
        fresh: Fresh,
        past: Past | None = None,
        paged: Paged | None = None,
    ) -> Output:
        """Run ``tokens`` int32[B, T] at ``positions`` int32[B, T]; ``valid`` bool[B, T] masks padding."""
        config = self.config
        normal = nn.initializers.normal(0.02)
        table = (normal, (config.vocab_size, config.hidden_size))
        embedding = self.param("embed", _group(embedding=table))["embedding"]
        if not config.tie_embeddings:
            self.param("lm_head", _group(kernel=table))
        layers = nn.scan(
            DecoderLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, *(nn.broadcast,) * 5),  # pyright: ignore[reportArgumentType]
            length=config.num_layers,
        )(config, name="layers")
        x = as_float(jnp.asarray(embedding)[tokens])
        bits, pages = (None, None) if paged is None else (paged.bits, paged.pages)
        shell = None if paged is None else dataclasses.replace(paged, bits=None, pages=None)
        carry, scanned = (x, jnp.int32(0)), (fresh.k, fresh.v, bits, pages)
        carry, (k, v, stats) = layers(carry, scanned, positions, valid, fresh.filled, past, shell)
        scale = self.param("norm", _group(scale=(nn.initializers.ones, (config.hidden_size,))))["scale"]
        return Output(rms_norm(carry[0], scale, config.rms_eps), Fresh(k, v, fresh.filled + tokens.shape[1]), stats)


def apply(
    config: ModelConfig,
    params: dict,
    tokens: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    fresh: Fresh,
    past: Past | None = None,
    paged: Paged | None = None,
) -> Output:
    """The pure forward of training, calibration and compiled steps: :class:`Decoder` on ``params``."""
    inputs = tokens, positions, valid, fresh, past, paged
    return Decoder(config).apply({"params": params}, *inputs)  # pyright: ignore[reportReturnType]


def _group(**leaves):
    """Initializer of a small dictionary of parameters: ``name=(init, shape)``."""

    def init(key):
        keys = jax.random.split(key, len(leaves))
        items = zip(keys, leaves.items(), strict=True)
        return {name: make(k, shape, jnp.float32) for k, (name, (make, shape)) in items}

    return init


def _declare_layer(module: nn.Module, config: ModelConfig, dense: bool) -> dict:
    """Parameters of one layer; names and shapes as in the checkpoint, every matrix ``[out, in]``."""
    normal, ones, zeros = nn.initializers.normal(0.02), nn.initializers.ones, nn.initializers.zeros
    narrow = nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def projection(width):
        bias = {"bias": (zeros, (width,))} if config.qkv_bias else {}
        return _group(kernel=(normal, (width, hidden)), **bias)

    def attention(key):
        keys = jax.random.split(key, 4)
        qkv = {n: projection(w)(k) for n, w, k in zip("qkv", (heads, kv_heads, kv_heads), keys[:3], strict=True)}
        return {**qkv, "o": _group(kernel=(narrow, (hidden, heads)))(keys[3])}

    params = {
        "input_norm": module.param("input_norm", _group(scale=(ones, (hidden,)))),
        "attn": module.param("attn", attention),
        "post_norm": module.param("post_norm", _group(scale=(ones, (hidden,)))),
        "router": module.param("router", _group(kernel=(normal, (config.num_experts, hidden)))),
    }
    if config.shared_size:
        params["shared"] = module.param(
            "shared",
            _group(
                gate_up=(normal, (2 * config.shared_size, hidden)),
                down=(narrow, (hidden, config.shared_size)),
                gate=(normal, (1, hidden)),
            ),
        )
    if dense:
        experts, size = config.num_experts, config.expert_size
        params["experts"] = module.param(
            "experts", _group(gate_up=(normal, (experts, 2 * size, hidden)), down=(narrow, (experts, hidden, size)))
        )
    return params


def logits(params: dict, hidden: jax.Array) -> jax.Array:
    """Head of the model: float32[..., V] from final-norm ``hidden`` [..., H]."""
    kernel = params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]
    if kernel.dtype == jnp.float32:
        return linear(hidden, kernel)
    # In parts: a float32 copy of a large vocabulary's head would be the largest temporary of a step.
    vocab = kernel.shape[0]
    parts = next((n for n in range(HEAD_PARTS, 2 * HEAD_PARTS) if vocab % n == 0), 1)
    scores = lax.map(lambda rows: linear(hidden, rows), kernel.reshape(parts, vocab // parts, -1))
    return jnp.moveaxis(scores, 0, -2).reshape(*hidden.shape[:-1], vocab)


def forward(
    config: ModelConfig, params: dict, tokens: jax.Array, lengths: jax.Array | None = None, paged: Paged | None = None
) -> Output:
    """Whole sequences from position 0, no cache: the form of training, calibration and scoring.

    ``tokens`` int32[B, T]; ``lengths`` int32[B] masks right padding (None: no padding).
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    valid = jnp.ones(tokens.shape, bool) if lengths is None else positions < lengths[:, None]
    fresh = Fresh.empty(config, batch, length)
    return apply(config, params, tokens, positions, valid, fresh, None, paged)


def init_params(config: ModelConfig, seed: int = 0) -> dict:
    """Random float32 parameters of the dense form."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    positions, valid = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    fresh = Fresh.empty(config, 1, 2)
    # Under jit the forward that Flax runs to find the parameters is dead code and is never compiled.
    init = jax.jit(lambda key: Decoder(config).init(key, tokens, positions, valid, fresh)["params"])
    return init(jax.random.key(seed))


def next_token_nll(config: ModelConfig, params: dict, tokens: jax.Array, paged: Paged | None = None):
    """Negative log-likelihood float32[B, T-1] of each next token, and the :class:`Output` of the inputs."""
    out = forward(config, params, tokens[:, :-1], paged=paged)
    scores = jax.nn.log_softmax(logits(params, out.hidden), axis=-1)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0], out


def loss_fn(config: ModelConfig):
    """``loss(params, tokens int32[B, T]) -> float32[B]``: mean next-token NLL of each sequence."""
    return lambda params, tokens: next_token_nll(config, params, tokens)[0].mean(-1)


def routing_mass(config: ModelConfig):
    """``mass(params, tokens int32[B, T]) -> float32[L, E]``: router weight each expert received."""
    return lambda params, tokens: forward(config, params, tokens).stats.mass

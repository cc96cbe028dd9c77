"""The decoder: one Flax module for training, calibration and compiled steps, layers scanned.

The module only declares parameters; the mathematics is in pure functions. Its two forms are *dense* (whole expert
weights among the parameters; trainable, the oracle) and *paged* (experts read through a page table).

Shapes: B sequences (or slots), T tokens of this call, F tokens of this dispatch (``F >= T``), L layers, ``L_kind`` of
them with one kind of attention.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear import Member
from pallas_kernels.paged_attention import Past, paged_attention
from pwjax.config import ModelConfig
from pwjax.models.layer import decoder_layer
from pwjax.models.layers import as_float, linear, rms_norm
from pwjax.models.moe import Paged, RoutingStats
from pwjax.models.scan import scan_layers
from pwjax.shapes import attention_shapes, layer_shapes

# Parts in which a head that must be converted is multiplied.
HEAD_PARTS = 8


class Fresh(NamedTuple):
    """KV of the tokens of one dispatch, before they are committed to pages.

    ``k``, ``v``: one array a kind of attention, [L_kind, B, F, kv_heads, D] in the cache dtype; ``filled`` int32[]:
    tokens already present.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    filled: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, tokens: int, dtype: Any = jnp.float32) -> "Fresh":
        """Room for ``tokens`` tokens of ``batch`` sequences."""

        def rows() -> tuple[jax.Array, ...]:
            kinds = zip(config.attention_kinds, config.kind_layers, strict=True)
            return tuple(
                jnp.zeros((len(layers), batch, tokens, kind.kv_heads, kind.head_dim), dtype) for kind, layers in kinds
            )

        return cls(rows(), rows(), jnp.int32(0))


class Output(NamedTuple):
    """Result of a forward: final-norm ``hidden`` float32[B, T, H], ``fresh`` KV, ``stats`` [L, ...]."""

    hidden: jax.Array
    fresh: Fresh
    stats: RoutingStats


class Layers(nn.Module):
    """Declares the parameters of all layers, stacked; names and shapes as in the checkpoint, matrices ``[out, in]``."""

    config: ModelConfig

    @nn.compact
    def __call__(self, dense: bool) -> dict:
        """The parameter tree; routed experts only where ``dense``."""
        config = self.config
        flat = {name: (config.num_layers, *shape) for name, shape in layer_shapes(config).items()}
        for kind, layers in zip(config.attention_kinds, config.kind_layers, strict=True):
            group = config.attention_group(kind)
            flat |= {f"{group}/{name}": (len(layers), *s) for name, s in attention_shapes(config, kind).items()}
        groups: dict[str, dict] = {}
        for name, shape in flat.items():
            group, _, leaf = name.partition("/")
            groups.setdefault(group, {})[leaf] = (_initializer(name, config), shape)
        if not dense:
            del groups["experts"]
        return {name: self.param(name, _group(leaves)) for name, leaves in groups.items()}


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
        past: tuple[Past, ...] | None = None,
        paged: Paged | None = None,
    ) -> Output:
        """Run ``tokens`` int32[B, T] at ``positions`` int32[B, T]; ``valid`` bool[B, T] masks padding.

        ``past`` holds the committed KV of each kind of attention.
        """
        config = self.config
        table = (_NORMAL, (config.vocab_size, config.hidden_size))
        embedding = self.param("embed", _group({"embedding": table}))["embedding"]
        if not config.tie_embeddings:
            self.param("lm_head", _group({"kernel": table}))
        layers = Layers(config, name="layers")(paged is None)
        scale = self.param("norm", _group({"scale": (nn.initializers.ones, (config.hidden_size,))}))["scale"]
        x = as_float(jnp.asarray(embedding)[tokens]) * config.embed_scale
        x, fresh, stats = run_layers(config, layers, x, positions, valid, fresh, past, paged)
        return Output(rms_norm(x, scale, config.rms_eps), fresh, stats)


def run_layers(
    config: ModelConfig,
    layers: dict,
    x: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    fresh: Fresh,
    past: tuple[Past, ...] | None,
    paged: Paged | None,
) -> tuple[jax.Array, Fresh, RoutingStats]:
    """All layers on ``x`` float32[B, T, H]; see :class:`Decoder`."""
    kinds = config.attention_kinds
    shared = {name: tree for name, tree in layers.items() if not name.startswith("attn")}
    attn = tuple(layers[config.attention_group(kind)] for kind in kinds)
    find: Callable[[Any, Any], Any] = lambda stack, item: item  # noqa: E731
    items, own_items = shared, attn
    bits_of_weights = layers["router"]["kernel"].dtype == jnp.uint16
    if paged is not None and (len(kinds) > 1 or bits_of_weights):
        # By index: a period's parameters, sliced for the scan over its runs, would be copied in every period, and
        # matrices that are read as they are in every layer.
        find = lambda stack, item: jax.tree.map(partial(_member, item), stack)  # noqa: E731
        items = jnp.arange(config.num_layers)
        own_items = tuple(jnp.arange(len(n)) for n in config.kind_layers)

    def layer(index: int, carry, item):
        x, counts = carry
        (at, bits, pages), (own_at, fresh_k, fresh_v) = item
        params = {**find(shared, at), "attn": find(attn[index], own_at)}
        local = None if paged is None else dataclasses.replace(paged, bits=bits, pages=pages)

        def attend(q, k, v):
            # Rounded to the cache dtype before attention reads them: chunk sizes then change nothing.
            new_k = lax.dynamic_update_slice_in_dim(fresh_k, k.astype(fresh_k.dtype), fresh.filled, axis=1)
            new_v = lax.dynamic_update_slice_in_dim(fresh_v, v.astype(fresh_v.dtype), fresh.filled, axis=1)
            own = None if past is None else past[index]
            attended = paged_attention(q, new_k, new_v, fresh.filled, own, counts[index], window=kinds[index].window)
            return attended, (new_k, new_v)

        out = decoder_layer(config, kinds[index], params, x, positions, valid, attend, local)
        counts = tuple(n + (i == index) for i, n in enumerate(counts))
        return (out.x, counts), (out.stats, out.kept)

    bits, pages = (None, None) if paged is None else (paged.bits, paged.pages)
    start = x, tuple(jnp.int32(0) for _ in kinds)
    own = tuple(zip(own_items, fresh.k, fresh.v, strict=True))
    (x, _), stats, kept = scan_layers(config.layer_kinds, layer, start, (items, bits, pages), own)
    k, v = zip(*kept, strict=True)
    return x, Fresh(k, v, fresh.filled + x.shape[1]), stats


def _member(index: jax.Array, stack: jax.Array) -> jax.Array | Member:
    """A layer's parameter; a matrix of bits stays where it lies."""
    member = Member(stack, index)
    return member if stack.ndim == 3 and stack.dtype == jnp.uint16 else member.cut()


def apply(
    config: ModelConfig,
    params: dict,
    tokens: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    fresh: Fresh,
    past: tuple[Past, ...] | None = None,
    paged: Paged | None = None,
) -> Output:
    """The pure forward of training, calibration and compiled steps: :class:`Decoder` on ``params``."""
    inputs = tokens, positions, valid, fresh, past, paged
    return Decoder(config).apply({"params": params}, *inputs)  # pyright: ignore[reportReturnType]


_NORMAL = nn.initializers.normal(0.02)


def _initializer(name: str, config: ModelConfig) -> Callable:
    """How a parameter of a layer starts: scales at 1, biases at 0, what is added to the residual smaller by depth."""
    leaf = name.split("/")[-1]
    if leaf.endswith(("scale", "scalar")):
        return nn.initializers.ones
    if leaf == "bias":
        return nn.initializers.zeros
    narrow = leaf == "down" or name.endswith("o/kernel")
    return nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5) if narrow else _NORMAL


def _group(leaves: dict) -> Callable:
    """Initializer of a small tree of parameters: ``{"a/b": (init, shape)}``; the name "" is a bare array."""

    def init(key):
        keys = jax.random.split(key, len(leaves))
        items = zip(keys, leaves.items(), strict=True)
        made = {name: make(k, shape, jnp.float32) for k, (name, (make, shape)) in items}
        if "" in made:
            return made[""]
        tree: dict = {}
        for name, value in made.items():
            *path, leaf = name.split("/")
            node = tree
            for step in path:
                node = node.setdefault(step, {})
            node[leaf] = value
        return tree

    return init


def head_parts(vocab: int) -> int:
    """Equal parts in which a head of ``vocab`` rows is converted: few, or one where no number divides it."""
    return next((n for n in range(HEAD_PARTS, 2 * HEAD_PARTS) if vocab % n == 0), 1)


@jax.named_scope("head")
def logits(config: ModelConfig, params: dict, hidden: jax.Array) -> jax.Array:
    """Head of the model: float32[..., V] from final-norm ``hidden`` [..., H]."""
    kernel = params["embed"]["embedding"] if config.tie_embeddings else params["lm_head"]["kernel"]
    # In parts: a float32 copy of a large vocabulary's head would be the largest temporary of a step.
    scores = linear(hidden, kernel, parts=head_parts(len(kernel)))
    return scores if config.softcap is None else config.softcap * jnp.tanh(scores / config.softcap)


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
    scores = jax.nn.log_softmax(logits(config, params, out.hidden), axis=-1)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0], out


def loss_fn(config: ModelConfig):
    """``loss(params, tokens int32[B, T]) -> float32[B]``: mean next-token NLL of each sequence."""
    return lambda params, tokens: next_token_nll(config, params, tokens)[0].mean(-1)


def routing_mass(config: ModelConfig):
    """``mass(params, tokens int32[B, T]) -> float32[L, E]``: router weight each expert received."""
    return lambda params, tokens: forward(config, params, tokens).stats.mass

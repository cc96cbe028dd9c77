"""One decoder layer as a pure function: the arithmetic of the families, without a scan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import paged_attention
from pwjax.config import AttentionKind, ModelConfig
from pwjax.models import gemma4, prenorm
from pwjax.models.layers import Attend
from pwjax.models.moe import Paged, RoutingStats, Trace

# The arithmetic of a layer by model type; the others norm before attention and before the experts.
_FORWARD: dict[str, Callable] = {"gemma4_text": gemma4.layer}


class LayerOutput(NamedTuple):
    """``x`` float32[B, T, H]; ``trace`` of the experts; ``stats`` of this layer; ``kept``, what ``attend`` kept."""

    x: jax.Array
    trace: Trace
    stats: RoutingStats
    kept: Any


def decoder_layer(
    config: ModelConfig,
    kind: AttentionKind,
    params: dict,
    x: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    attend: Attend,
    paged: Paged | None = None,
    bump: jax.Array | None = None,
) -> LayerOutput:
    """Run one layer on ``x`` float32[B, T, H] at ``positions`` int32[B, T]; ``valid`` bool[B, T] masks padding.

    ``params`` is what :func:`layer_params` gives, ``attend`` for example :func:`whole_sequences`. ``paged`` carries
    the ``bits`` [E, 2] and ``pages`` [E, 2, S] of this layer. ``bump`` float32[B * T, H] is added to the weighted sum
    of the routed experts, so that a derivative by it is the derivative by their output.
    """
    forward = _FORWARD.get(config.model_type, prenorm.layer)
    return LayerOutput(*forward(config, kind, params, x, positions, valid.reshape(-1), attend, paged, bump))


def whole_sequences(kind: AttentionKind) -> Attend:
    """``attend`` of whole sequences from position 0; it keeps nothing."""

    def attend(q, k, v):
        return paged_attention(q, k, v, jnp.int32(0), None, jnp.int32(0), window=kind.window), None

    return attend


def layer_params(config: ModelConfig, layers: dict, layer: int, experts: bool = True) -> dict:
    """Parameters of one layer for :func:`decoder_layer`, from the stacked tree ``params["layers"]``.

    Leaves may be anything that is indexed by layer; without ``experts`` those are left out.
    """
    kind = config.layer_kinds[layer]
    index = config.kind_layers[kind].index(layer)
    shared = {name: tree for name, tree in layers.items() if not name.startswith("attn")}
    if not experts:
        shared.pop("experts", None)
    out = _at(shared, layer)
    return {**out, "attn": _at(layers[config.attention_group(config.attention_kinds[kind])], index)}


def _at(tree: Any, index: int) -> Any:
    """``leaf[index]`` of every leaf of nested dictionaries."""
    return {name: _at(value, index) if isinstance(value, dict) else value[index] for name, value in tree.items()}

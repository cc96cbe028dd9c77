"""Router and mixture of experts: shared expert, and routed experts in dense or paged form."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn import dense_expert_ffn, expert_ffn
from pallas_kernels.pages import Geometry
from pwjax.config import ModelConfig
from pwjax.models.layers import linear


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("arena", "bits", "pages"),
    meta_fields=("geometry", "implementation"),
)
@dataclass(frozen=True)
class Paged:
    """Routed experts read through a page table: ``bits`` int32[L, E, 2], ``pages`` int32[L, E, 2, S]."""

    arena: jax.Array
    bits: jax.Array | None
    pages: jax.Array | None
    geometry: Geometry
    implementation: str | None = None


class RoutingStats(NamedTuple):
    """Sums over valid tokens, float32, a leading layer axis outside of a layer.

    ``mass`` [E] router weight given to an expert; ``count`` [E] choices; ``prob`` [E] router probability;
    ``norms`` [E, 2] gate-weighted squared norms of the inputs of ``gate_up`` and ``down`` (0 in dense form).
    """

    mass: jax.Array
    count: jax.Array
    prob: jax.Array
    norms: jax.Array


def route(x: jax.Array, router: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose experts for ``x`` float32[T, H]: ``(gates [T, k], experts int32[T, k], probs [T, E])``."""
    probs = jax.nn.softmax(linear(x, router), axis=-1)
    gates, experts = jax.lax.top_k(probs, config.top_k)
    if config.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdims=True)
    return gates, experts, probs


def shared_expert(x: jax.Array, params: dict) -> jax.Array:
    """The expert that every token passes, scaled by its own sigmoid gate."""
    gate, up = jnp.split(linear(x, params["gate_up"]), 2, axis=-1)
    out = linear(jax.nn.silu(gate) * up, params["down"])
    return jax.nn.sigmoid(linear(x, params["gate"])) * out


def moe(
    x: jax.Array, valid: jax.Array, params: dict, config: ModelConfig, paged: Paged | None
) -> tuple[jax.Array, RoutingStats]:
    """One MoE layer on ``x`` float32[T, H] with ``valid`` bool[T]; padding reaches neither experts nor stats.

    ``params`` holds ``router``, ``shared`` and, in dense form, ``experts``; in paged form ``paged`` carries
    this layer's ``bits`` [E, 2] and ``pages`` [E, 2, S].
    """
    gates, experts, probs = route(x, params["router"]["kernel"], config)
    if paged is None:
        y = dense_expert_ffn(x, experts, gates, valid, params["experts"]["gate_up"], params["experts"]["down"])
        norms = jnp.zeros((*experts.shape, 2), jnp.float32)
    else:
        assert paged.bits is not None and paged.pages is not None
        y, norms = expert_ffn(
            x, experts, gates, valid, paged.arena, paged.bits, paged.pages, paged.geometry, paged.implementation
        )
    if "shared" in params:
        y = y + shared_expert(x, params["shared"])
    weight = jnp.where(valid[:, None], gates, 0.0)
    zeros = jnp.zeros(config.num_experts, jnp.float32)
    stats = RoutingStats(
        mass=zeros.at[experts].add(weight),
        count=zeros.at[experts].add(jnp.broadcast_to(valid[:, None].astype(jnp.float32), experts.shape)),
        prob=jnp.where(valid[:, None], probs, 0.0).sum(0),
        norms=jnp.zeros((config.num_experts, 2), jnp.float32).at[experts].add(weight[..., None] * norms),
    )
    return y, stats

"""Routers and routed experts, the latter in dense or paged form."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn import dense_expert_ffn, expert_ffn
from pallas_kernels.pages import Geometry
from pwjax.config import ModelConfig
from pwjax.models.layers import as_float, linear, rms_norm, row_sum, softmax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("arena", "bits", "pages"),
    meta_fields=("geometry", "implementation", "moments"),
)
@dataclass(frozen=True)
class Paged:
    """Routed experts read through a page table: ``bits`` int32[L, E, 2], ``pages`` int32[L, E, 2, S].

    ``moments``: statistics include second moments of what the experts read.
    """

    arena: jax.Array
    bits: jax.Array | None
    pages: jax.Array | None
    geometry: Geometry
    implementation: str | None = None
    moments: bool = False


class Routing(NamedTuple):
    """Choices of T tokens: ``gates`` float32[T, k] what outputs are multiplied by; ``experts`` int32[T, k];
    ``weights`` float32[T, k] the router's share of each choice, without scales; ``probs`` float32[T, E].
    """

    gates: jax.Array
    experts: jax.Array
    weights: jax.Array
    probs: jax.Array


class RoutingStats(NamedTuple):
    """Sums over valid tokens, float32, a leading layer axis outside of a layer.

    ``mass`` [E] router weight given to an expert; ``count`` [E] choices; ``prob`` [E] router probability;
    ``norms`` [E, 2, 3] of the inputs of ``gate_up`` and ``down``: sums of the gate-weighted norms and squared norms,
    and the largest norm (0 in dense form). ``moments`` ([E, H], [E, I]) or None where not asked for: sums of
    ``gate^2 * input^2`` of the inputs of ``gate_up`` and ``down``.
    """

    mass: jax.Array
    count: jax.Array
    prob: jax.Array
    norms: jax.Array
    moments: tuple[jax.Array, jax.Array] | None = None

    def plus(self, other: "RoutingStats") -> "RoutingStats":
        """The statistics of both, of other tokens through the same layers."""
        both = jax.tree.map(jnp.add, self, other)
        return both._replace(norms=both.norms.at[..., 2].set(jnp.maximum(self.norms[..., 2], other.norms[..., 2])))


class Trace(NamedTuple):
    """What calibration sees of one layer: ``inputs`` float32[T, H] of the experts, ``experts`` int32[T, k] and
    ``gates`` float32[T, k] of each choice.
    """

    inputs: jax.Array
    experts: jax.Array
    gates: jax.Array


@jax.named_scope("router")
def route(config: ModelConfig, params: dict, x: jax.Array) -> Routing:
    """Softmax over all experts in float32, then the best k of ``x`` float32[T, H]; the lowest id wins ties."""
    return _choose(config, linear(x, params["kernel"]))


@jax.named_scope("router")
def route_scaled(config: ModelConfig, params: dict, x: jax.Array) -> Routing:
    """Gemma 4: the router norms and scales its own input, and an expert's scale multiplies its gate."""
    x = rms_norm(x, params["scale"], config.rms_eps) * config.hidden_size**-0.5
    chosen = _choose(config, linear(x, params["kernel"]))
    return chosen._replace(gates=chosen.weights * as_float(params["expert_scale"])[chosen.experts])


def _choose(config: ModelConfig, scores: jax.Array) -> Routing:
    probs = softmax(scores)
    weights, experts = jax.lax.top_k(probs, config.top_k)
    if config.norm_topk_prob:
        weights = weights / row_sum(weights)
    return Routing(weights, experts, weights, probs)


@jax.named_scope("experts")
def routed_experts(
    config: ModelConfig,
    params: dict,
    x: jax.Array,
    valid: jax.Array,
    routing: Routing,
    paged: Paged | None,
    bump: jax.Array | None = None,
) -> tuple[jax.Array, Trace, RoutingStats]:
    """Weighted sum of the chosen experts of ``x`` float32[T, H]; padding reaches neither experts nor statistics.

    ``params`` holds ``experts`` in dense form; in paged form ``paged`` carries this layer's ``bits`` [E, 2] and
    ``pages`` [E, 2, S]. ``bump`` float32[T, H] is added to the result, for derivatives by it.
    """
    gates, experts, moments = routing.gates, routing.experts, None
    if paged is None:
        weights = params["experts"]["gate_up"], params["experts"]["down"]
        y = dense_expert_ffn(x, experts, gates, valid, *weights, activation=config.activation)
        norms = jnp.zeros((*experts.shape, 2), jnp.float32)
    else:
        assert paged.bits is not None and paged.pages is not None
        y, norms, *rest = expert_ffn(
            x, experts, gates, valid, paged.arena, paged.bits, paged.pages, paged.geometry, paged.implementation,
            activation=config.activation, moments=paged.moments,
        )  # fmt: skip
        moments = rest[0] if rest else None
    if bump is not None:
        y = y + bump
    weight = jnp.where(valid[:, None], routing.weights, 0.0)
    zeros = jnp.zeros(config.num_experts, jnp.float32)
    stats = RoutingStats(
        mass=zeros.at[experts].add(weight),
        count=zeros.at[experts].add(jnp.broadcast_to(valid[:, None].astype(jnp.float32), experts.shape)),
        prob=jnp.where(valid[:, None], routing.probs, 0.0).sum(0),
        norms=_norm_sums(weight, experts, norms, config.num_experts),
        moments=moments,
    )
    return y, Trace(x, experts, gates), stats


def _norm_sums(weight: jax.Array, experts: jax.Array, squares: jax.Array, num_experts: int) -> jax.Array:
    """``RoutingStats.norms`` of ``weight`` float32[T, k] and squared norms float32[T, k, 2], 0 where masked."""
    # The root has no derivative at 0, which masked choices have.
    weight, squares = jax.lax.stop_gradient((weight, squares))
    norm = jnp.sqrt(squares)
    sums = jnp.stack([weight[..., None] * norm, weight[..., None] * squares], axis=-1)
    zeros = jnp.zeros((num_experts, 2), jnp.float32)
    largest = zeros.at[experts].max(norm)
    return jnp.concatenate([jnp.stack([zeros, zeros], -1).at[experts].add(sums), largest[..., None]], axis=-1)

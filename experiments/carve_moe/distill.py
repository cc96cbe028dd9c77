"""The loss that teaches the carved model what the dense one does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.carve_moe.model import Routed, _product, linear, run_layers
from pwjax.config import ModelConfig


class Weights(NamedTuple):
    """Of the terms beside the divergence: ``router`` (cross entropy with the experts of most energy), ``balance``
    (selection rates farther than ``slack`` from the mean), ``hidden`` (what feed-forward layers read).
    """

    router: float = 0.05
    balance: float = 1.0
    hidden: float = 0.5
    slack: float = 0.15


def relative_error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """Mean over tokens of the squared error over the squared norm of what is wanted, which is constant."""
    wanted = jax.lax.stop_gradient(wanted)
    squares = jnp.sum(wanted**2, -1)
    return jnp.mean(jnp.sum((found - wanted) ** 2, -1) / (squares + 0.01 * squares.mean()))


def routing_terms(config: ModelConfig, routed: Routed, weights: Weights) -> tuple[jax.Array, jax.Array]:
    """Router and balance terms, weighted, of layers stacked; and selection rates [L, E]."""
    soft = jnp.clip(routed.soft, 1e-4, 1 - 1e-4)
    entropy = -jnp.mean(routed.wanted * jnp.log(soft) + (1 - routed.wanted) * jnp.log(1 - soft))
    rates = routed.chosen.mean(1)
    off = jnp.maximum(jnp.abs(rates - config.top_k / config.num_experts) - weights.slack, 0.0)
    return weights.router * entropy + weights.balance * jnp.mean(off**2), rates


@jax.custom_vjp
def divergence(hidden: jax.Array, teacher: jax.Array, head: jax.Array) -> jax.Array:
    """Mean KL(teacher || student) in nats of final hidden states [T, H] under one frozen ``head`` [V, H].

    The gradient is formed together with the value, a few rows at a time: logits of all rows would be the largest
    arrays of a step.
    """
    return _divergence(hidden, teacher, head)[0]


def _divergence(hidden, teacher, head):
    def part(rows):
        student, target = (jax.nn.log_softmax(linear(x, head), -1) for x in rows)
        p = jnp.exp(target)
        return jnp.sum(p * (target - student), -1), _product("tv,vh->th", jnp.exp(student) - p, head)

    pieces = range(0, len(hidden), 256)
    parts = [part([x[start : start + 256] for x in (hidden, teacher)]) for start in pieces]
    value, gradient = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    return value.mean(), (gradient / len(hidden), head)


def _divergence_backward(saved, dy):
    gradient, head = saved
    return dy * gradient, jnp.zeros_like(gradient), jnp.zeros_like(head)


divergence.defvjp(_divergence, _divergence_backward)


def distillation_loss(config: ModelConfig, weights: Weights):
    """``loss(params, teacher, tokens)``: KL of the model's next-token distributions from the teacher's.

    ``params`` has no embedding: that and the head, which are one, are the teacher's.
    """

    def loss(params, teacher, tokens):
        target, (target_reads, _, _) = jax.lax.stop_gradient(run_layers(config, teacher, tokens))
        hidden, (reads, _, routed) = run_layers(config, {**params, "embed": teacher["embed"]}, tokens)
        flat = (x.reshape(-1, x.shape[-1]) for x in (hidden, target))
        kl = divergence(*flat, teacher["embed"]["embedding"])
        extra, rates = routing_terms(config, routed, weights)
        away = relative_error(reads, target_reads)
        return kl + extra + weights.hidden * away, {"kl": kl, "hidden": away, "rates": rates}

    return loss

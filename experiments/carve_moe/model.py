"""The carved model in the form that it is trained in: all experts computed at once, those not chosen multiplied by 0.

The tree has pwjax's names and shapes for Qwen2-MoE. While it is trained, gates are ``E x softmax`` and the shared
expert's is ``2 x sigmoid``, so that all are 1 where the router knows nothing and the model is the dense one;
:func:`fold` moves both factors into ``down``, which makes it plain Qwen2-MoE.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from experiments.carve_moe import smollm2
from pallas_kernels import native
from pwjax.config import ModelConfig
from pwjax.models.layers import rms_norm, rotate

# Routed experts, of 64 neurons each, and the neurons of the shared one.
EXPERTS, SHARED = 15, 576
# What products are computed in: a processor without instructions for bfloat16 is faster in float32.
PRODUCTS = jnp.float32 if native.problem() or native.activations() == "float32" else jnp.bfloat16
# The slope of choices: how far, in router logits, an expert is from being chosen for its gradient to fade.
SLOPE = 0.02


def moe_config(top_k: int, experts: int = EXPERTS, shared: int = SHARED) -> ModelConfig:
    """Qwen2-MoE of SmolLM2's shape. ValueError where the neurons that are not shared are no whole number an expert."""
    size, odd = divmod(smollm2.FFN - shared, experts)
    if odd:
        raise ValueError(f"{smollm2.FFN} neurons less {shared} shared ones are not {experts} equal experts")
    return ModelConfig(
        model_type="qwen2_moe", vocab_size=smollm2.VOCAB, hidden_size=smollm2.HIDDEN, num_layers=smollm2.LAYERS,
        num_heads=smollm2.HEADS, num_kv_heads=smollm2.KV_HEADS, head_dim=smollm2.HEAD_DIM, num_experts=experts,
        top_k=top_k, expert_size=size, shared_size=shared, norm_topk_prob=False, rms_eps=smollm2.RMS_EPS,
        rope_theta=smollm2.ROPE_THETA, max_positions=smollm2.CONTEXT, tie_embeddings=True, qkv_bias=False,
        eos_token_ids=(smollm2.IM_END, smollm2.END_OF_TEXT),
    )  # fmt: skip


def config_of(carved: dict, top_k: int) -> ModelConfig:
    """The config of a carved tree, whose sizes its arrays tell."""
    layers = carved["layers"]
    return moe_config(top_k, layers["router"]["kernel"].shape[-2], layers["shared"]["down"].shape[-1])


class Routed(NamedTuple):
    """What a layer's router did with T tokens: ``chosen`` float32[T, E] of 0 and 1 with the gradient of a soft choice,
    ``wanted`` of the experts with the most energy, ``soft`` the choice as a probability.
    """

    chosen: jax.Array
    wanted: jax.Array
    soft: jax.Array


@jax.custom_vjp
def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel.T`` of float32, multiplied in ``PRODUCTS`` and summed in float32, in the backward pass too."""
    return _product("...k,nk->...n", x, kernel)


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a.astype(PRODUCTS), b.astype(PRODUCTS), preferred_element_type=jnp.float32)


def _linear_forward(x, kernel):
    return linear(x, kernel), (x, kernel)


def _linear_backward(saved, dy):
    x, kernel = saved
    rows, grads = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    # XLA multiplies bfloat16 on a CPU only where sums run along rows of the first matrix: elsewhere in float32, at a
    # fraction of the speed. Hence the transpose, which it would fold into the product if it could.
    across = with_layout_constraint(grads.astype(PRODUCTS).T, Layout(major_to_minor=(0, 1)))
    return _product("...n,nk->...k", dy, kernel), _product("nt,tk->nk", across, rows)


linear.defvjp(_linear_forward, _linear_backward)


def split_heads(config: ModelConfig, params: dict, x: jax.Array, positions: jax.Array):
    """Rotated queries (scaled) and keys, and values, [B, T, heads, D], of normed ``x`` [B, T, H]."""
    q, k, v = (linear(x, params[n]["kernel"]).reshape(*x.shape[:2], -1, config.head_dim) for n in "qkv")
    return (
        rotate(q, positions, config.rope_theta) * config.head_dim**-0.5,
        rotate(k, positions, config.rope_theta),
        v,
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention [B, T, heads * D] of ``q`` [B, T, heads, D] to ``k``, ``v`` [B, S, kv_heads, D] under ``mask``."""
    batch, tokens, heads, size = q.shape
    groups, per_group = k.shape[2], heads // k.shape[2]
    # One product a group of heads, its operands contiguous: several times as fast as to contract them in place.
    k, v = (x.swapaxes(1, 2).reshape(batch * groups, -1, size) for x in (k, v))
    q = q.reshape(batch, tokens, groups, per_group, size).transpose(0, 2, 3, 1, 4).reshape(batch * groups, -1, size)
    scores = jnp.einsum("nqd,nsd->nqs", q, k).reshape(batch * groups, per_group, tokens, -1)
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1).reshape(batch * groups, per_group * tokens, -1)
    mixed = jnp.einsum("nqs,nsd->nqd", weights, v).reshape(batch, groups, per_group, tokens, size)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads * size)


def mlp(x: jax.Array, params: dict, gates: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Gated MLP of ``x`` [T, H], its neurons times ``gates`` [T, F]; also gives the neurons before them."""
    gate, up = jnp.split(linear(x, params["gate_up"]), 2, axis=-1)
    inner = jax.nn.silu(gate) * up
    return linear(inner if gates is None else inner * gates, params["down"]), inner


def energy(inner: jax.Array, down: jax.Array, experts: int) -> jax.Array:
    """What each expert adds to the residual, as the sum of its neurons' squared outputs: [T, E]."""
    squares = inner**2 * jnp.sum(down**2, axis=0)
    return squares.reshape(*inner.shape[:-1], experts, -1).sum(-1)


def top_mask(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """1 at the ``k`` largest of ``scores`` [T, E]; and the middle [T, 1] between the last chosen and the next."""
    ordered = jnp.sort(scores, axis=-1)[:, ::-1]
    middle = (ordered[:, k - 1 : k] + ordered[:, min(k, scores.shape[1] - 1)][:, None]) / 2
    _, index = jax.lax.top_k(scores, k)
    return jnp.zeros_like(scores).at[jnp.arange(len(scores))[:, None], index].set(1.0), middle


def moe(config: ModelConfig, params: dict, x: jax.Array) -> tuple[jax.Array, Routed]:
    """Experts and shared expert of normed ``x`` [T, H].

    A choice has no derivative: the gradient is that of a sigmoid around the threshold, which also reaches experts that
    were not chosen, as all are computed.
    """
    experts, size = config.num_experts, config.expert_size
    scores = jnp.einsum("tk,nk->tn", x, params["router"]["kernel"])
    hard, middle = top_mask(jax.lax.stop_gradient(scores), config.top_k)
    soft = jax.nn.sigmoid((scores - middle) / SLOPE)
    chosen = hard + soft - jax.lax.stop_gradient(soft)
    gates = experts * jax.nn.softmax(scores, axis=-1) * chosen
    merged = {
        # One matrix for all: gate rows of every expert, then up rows.
        "gate_up": params["experts"]["gate_up"].reshape(experts, 2, size, -1).swapaxes(0, 1).reshape(-1, x.shape[1]),
        "down": params["experts"]["down"].swapaxes(0, 1).reshape(x.shape[1], -1),
    }
    y, inner = mlp(x, merged, jnp.repeat(gates, size, axis=-1))
    wanted, _ = top_mask(jax.lax.stop_gradient(energy(inner, merged["down"], experts)), config.top_k)
    shared = 2 * jax.nn.sigmoid(x @ params["shared"]["gate"].T)
    return y + shared * mlp(x, params["shared"])[0], Routed(chosen, wanted, soft)


def feed_forward(config: ModelConfig, params: dict, x: jax.Array) -> tuple[jax.Array, Routed | None]:
    """The dense MLP or the experts of one layer, whichever it has, of ``x`` [T, H]."""
    return (mlp(x, params["mlp"])[0], None) if "mlp" in params else moe(config, params, x)


def run_layers(config: ModelConfig, params: dict, tokens: jax.Array):
    """Final-norm hidden [B, T, H], and of every layer: what its feed-forward part read, what it gave, its routing."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.tril(jnp.ones((length, length), bool))

    def layer(x, p):
        h = rms_norm(x, p["input_norm"]["scale"], config.rms_eps)
        x = x + linear(attend(*split_heads(config, p["attn"], h, positions), mask), p["attn"]["o"]["kernel"])
        h = rms_norm(x, p["post_norm"]["scale"], config.rms_eps).reshape(batch * length, -1)
        y, routed = feed_forward(config, p, h)
        return x + y.reshape(x.shape), (h, y, routed)

    x = params["embed"]["embedding"][tokens].astype(jnp.float32)
    x, seen = jax.lax.scan(layer, x, params["layers"], unroll=True)
    return rms_norm(x, params["norm"]["scale"], config.rms_eps), seen


def fold(config: ModelConfig, params: dict) -> dict:
    """The tree with the gates' factors inside ``down``: plain Qwen2-MoE."""
    layers = params["layers"]
    experts = {**layers["experts"], "down": layers["experts"]["down"] * config.num_experts}
    shared = {**layers["shared"], "down": layers["shared"]["down"] * 2}
    return {**params, "layers": {**layers, "experts": experts, "shared": shared}}

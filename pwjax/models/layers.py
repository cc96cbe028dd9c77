"""Norm, rotary positions, projections and attention shared by the model families; pure functions, float32 inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear import Member, widen
from pallas_kernels.linear import linear as product
from pwjax.config import AttentionKind, ModelConfig

# ``attend(q, k, v)``: attention of this call's queries; gives the result [B, T, heads * D] and what it kept of k, v.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def as_float(x: jax.Array) -> jax.Array:
    """A parameter in float32; uint16 means the bits of bfloat16.

    The engine keeps parameters as bits: XLA on the CPU has no bfloat16 loops, and would hold a float32 copy of the
    weights of all layers for as long as a step runs.
    """
    return widen(x) if x.dtype == jnp.uint16 else x.astype(jnp.float32)


def row_sum(x: jax.Array) -> jax.Array:
    """Sum of ``x`` [..., n], numbers from 0 on, over the last axis, kept as 1.

    In one order whatever the number of rows: XLA's own sums take another from some number of rows on. A token's last
    bits would then say how many were computed beside it, and a router or a rounding make more of them.
    """
    # Keeps products out of it, which may or may not be rounded before they are added, as loops come to be vectorized.
    x = jnp.maximum(x, 0.0)
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        rest = x[..., half:]
        if n % 2:
            rest = jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
        x = x[..., :half] + rest
    return x


@jax.custom_jvp
def exponential(x: jax.Array) -> jax.Array:
    """exp of ``x`` up to 0, within two units in the last place; below -87 as at -87.

    The same bits whatever is computed beside them: XLA's differ where a loop is not vectorized. A power of two and a
    polynomial of degree 6 on [-ln2/2, ln2/2], as in the kernels in C++.
    """
    x = jnp.maximum(x, -87.0)
    n = jnp.round(x * 1.44269504)
    f = (x - n * 0.693359375) + n * 2.12194440e-4
    p = jnp.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * f + c
    p = p * (f * f) + f + 1.0
    return lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32) * p


exponential.defjvps(lambda tangent, result, x: tangent * result)


def softmax(scores: jax.Array) -> jax.Array:
    """Softmax of float32 ``scores`` over the last axis; a row does not depend on how many there are."""
    shares = exponential(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return shares / row_sum(shares)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, times ``scale`` (None: 1), in float32."""
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
    return x if scale is None else x * as_float(scale)


def linear(x: jax.Array, kernel: jax.Array | Member, bias: jax.Array | None = None, parts: int = 1) -> jax.Array:
    """``x @ kernel.T + bias`` of float32 ``x`` with ``kernel`` [out, in].

    A kernel of bits is read by the kernels in use, see :func:`pallas_kernels.linear.linear` for ``parts``; one of
    numbers is an einsum, for a batch-1 ``x @ W.T`` is several times slower on some XLA CPU versions.
    """
    if isinstance(kernel, Member) or kernel.dtype == jnp.uint16:
        y = product(x, kernel, parts)
    else:
        y = jnp.einsum("...k,nk->...n", x, as_float(kernel))
    return y if bias is None else y + as_float(bias)


def rotate(x: jax.Array, positions: jax.Array, theta: float, fraction: float = 1.0) -> jax.Array:
    """Rotary position embedding in the half-split form.

    ``x`` float32[B, T, heads, D], ``positions`` int32[B, T]. Of the D/2 frequencies the first ``fraction`` rotate and
    the rest is 0; they do not depend on it, for the divisor is always D ("proportional" positions).
    """
    half = x.shape[-1] // 2
    index = jnp.arange(half, dtype=jnp.float32)
    frequency = jnp.where(index < int(fraction * x.shape[-1] // 2), theta ** (-index / half), 0.0)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def activate(config: ModelConfig, gate: jax.Array) -> jax.Array:
    """The model's activation."""
    return jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)


@jax.named_scope("mlp")
def gated_mlp(config: ModelConfig, x: jax.Array, params: dict) -> jax.Array:
    """A dense MLP with ``gate_up`` [2I, H] and ``down`` [H, I]."""
    gate, up = jnp.split(linear(x, params["gate_up"]), 2, axis=-1)
    return linear(activate(config, gate) * up, params["down"])


@jax.named_scope("attention")
def attention(
    config: ModelConfig, kind: AttentionKind, params: dict, x: jax.Array, positions: jax.Array, attend: Attend
) -> tuple[jax.Array, Any]:
    """Attention of normed ``x`` float32[B, T, H]: float32[B, T, H], and what ``attend`` kept.

    ``attend`` gets queries already scaled, and rotated keys and queries.
    """

    def heads(name: str) -> jax.Array:
        y = linear(x, params[name]["kernel"], params[name].get("bias"))
        return y.reshape(*x.shape[:-1], -1, kind.head_dim)

    q, k = heads("q"), heads("k")
    v = k if kind.k_eq_v else heads("v")
    if config.qk_norm:
        q, k = (rms_norm(a, params[n]["scale"], config.rms_eps) for a, n in ((q, "q_norm"), (k, "k_norm")))
        v = rms_norm(v, None, config.rms_eps)
    scale = kind.head_dim**-0.5 if config.query_scale is None else config.query_scale
    q = rotate(q, positions, kind.rope_theta, kind.rope_fraction) * scale
    k = rotate(k, positions, kind.rope_theta, kind.rope_fraction)
    attended, kept = attend(q, k, v)
    return linear(attended, params["o"]["kernel"]), kept

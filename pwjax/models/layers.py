"""Norm, rotary positions and projections shared by the model families; pure functions, float32 inside."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, times ``scale``, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * as_float(scale)


def as_float(x: jax.Array) -> jax.Array:
    """A parameter in float32; uint16 means the bits of bfloat16.

    The engine keeps parameters as bits: XLA on the CPU has no bfloat16 loops, and would hold a float32 copy of the
    weights of all layers for as long as a step runs.
    """
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``x @ kernel.T + bias`` of float32 ``x`` with ``kernel`` [out, in].

    Written as an einsum: a batch-1 ``x @ W.T`` is several times slower on some XLA CPU versions.
    """
    y = jnp.einsum("...k,nk->...n", x, as_float(kernel))
    return y if bias is None else y + as_float(bias)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding in the half-split form.

    ``x`` float32[B, T, heads, D], ``positions`` int32[B, T].
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

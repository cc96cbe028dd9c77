"""Attention in C++ on CPUs: pages are read where they lie, threads share slots, KV heads and blocks of queries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged_attention.reference import Past, attention_gradients


def native_paged_attention(
    q: jax.Array,
    fresh_k: jax.Array,
    fresh_v: jax.Array,
    fresh_start: jax.Array | int,
    past: Past | None,
    layer: jax.Array | int,
    window: int | None = None,
) -> jax.Array:
    """Attention as :func:`pallas_kernels.paged_attention.paged_attention`, one custom call; float32 inside.

    A row of the result depends on its own slot and query alone, bit for bit, whatever is computed beside it and
    however the tokens it sees are divided into past and fresh ones. A page, layer or length out of range is an error of
    the call where the reference reads something else.
    """
    return _attend(window, q, fresh_k, fresh_v, jnp.int32(fresh_start), past, jnp.int32(layer))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window, q, fresh_k, fresh_v, start, past, layer):
    library, _ = native.load()
    assert library is not None, "the dispatcher asks problem() first"
    (batch, queries, heads, dim), kv_heads = q.shape, fresh_k.shape[2]
    if past is None:
        empty = jnp.zeros((batch, 1, 2, 0), jnp.int32)
        past, layer = Past(jnp.zeros((0, 0), jnp.uint32), empty, jnp.zeros(batch, jnp.int32)), jnp.int32(0)
    # The scratch is an output, so that XLA's figures of the program's memory count it.
    scratch = library.pwjax_paged_attention_scratch(batch, queries, heads, kv_heads, dim)
    call = jax.ffi.ffi_call(
        "pwjax_paged_attention",
        (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((scratch,), jnp.float32)),
        vmap_method="sequential",
    )
    out, _ = call(q, fresh_k, fresh_v, start, *past, layer, window=np.int64(window or 0))
    return out.reshape(batch, queries, heads * dim)


def _forward(window, *read):
    return _attend(window, *read), read


_attend.defvjp(_forward, attention_gradients)

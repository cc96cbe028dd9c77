"""The product in plain XLA: the oracle of the native one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Member(NamedTuple):
    """Matrix ``index`` int32[] of ``stack`` [L, N, K], not cut out of it: that would be a copy."""

    stack: jax.Array
    index: jax.Array

    def cut(self) -> jax.Array:
        """The matrix [N, K] by itself."""
        return lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)


def widen(bits: jax.Array) -> jax.Array:
    """float32 numbers of uint16, the bits of bfloat16."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def xla_linear(x: jax.Array, kernel: Member, parts: int = 1) -> jax.Array:
    """As :func:`pallas_kernels.linear.linear`; the matrix is widened whole, or one of ``parts`` after another.

    Written as an einsum: a batch-1 ``x @ W.T`` is several times slower on some XLA CPU versions.
    """

    def product(rows):
        return jnp.einsum("...k,nk->...n", x, widen(rows))

    rows = kernel.cut()
    if parts == 1:
        return product(rows)
    # A derivative widens them again, or it would keep them all.
    y = lax.map(jax.checkpoint(product), rows.reshape(parts, len(rows) // parts, -1))
    return jnp.moveaxis(y, 0, -2).reshape(*x.shape[:-1], len(rows))

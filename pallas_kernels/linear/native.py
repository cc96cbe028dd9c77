"""The product in C++ on CPUs: weights are read as they are, threads split their rows."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.linear.reference import Member, xla_linear


def native_linear(x: jax.Array, kernel: Member, parts: int = 1) -> jax.Array:
    """As :func:`pallas_kernels.linear.linear`, one custom call; an index out of range is an error of the call.

    Sums are float32; ``x`` is rounded as :func:`pallas_kernels.native.activations` says. Nothing is widened in memory,
    so ``parts`` mean nothing. A row of the result depends on its own row of ``x`` alone, bit for bit, whatever is
    computed beside it.
    """
    return _product(native.exact(), x, kernel)


# What the environment says is an argument: JAX keeps what it has traced.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(exact, x, kernel):
    library, _ = native.load()
    assert library is not None, "the dispatcher asks problem() first"
    stack, rows = kernel.stack, x.reshape(-1, x.shape[-1])
    if odd := x.shape[-1] % 2:  # columns are read in pairs
        stack, rows = jnp.pad(stack, ((0, 0), (0, 0), (0, odd))), jnp.pad(rows, ((0, 0), (0, odd)))
    call = jax.ffi.ffi_call(
        "pwjax_linear",
        (
            jax.ShapeDtypeStruct((len(rows), stack.shape[1]), jnp.float32),
            # An output, so that XLA's figures of the program's memory count it.
            jax.ShapeDtypeStruct((library.pwjax_linear_scratch(*rows.shape),), jnp.float32),
        ),
        vmap_method="sequential",
    )
    return call(rows, stack, kernel.index, exact=exact)[0].reshape(*x.shape[:-1], -1)


def _forward(exact, x, kernel):
    return _product(exact, x, kernel), (x, kernel)


def _backward(exact, read, cotangent):
    """The cotangent of ``x``, on XLA; weights are constants."""
    x, kernel = read
    return jax.vjp(lambda x: xla_linear(x, kernel), x)[1](cotangent)[0], None


_product.defvjp(_forward, _backward)

"""Public op and dispatch: ``implementation=None`` takes :func:`pallas_kernels.chosen_kernels`; nothing falls back."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, native
from pallas_kernels.linear.native import native_linear
from pallas_kernels.linear.reference import Member, xla_linear

# On GPUs this is XLA's own ground, whichever kernels the other ops take there.
IMPLEMENTATIONS = {"xla": xla_linear, "native": native_linear, "pallas": xla_linear, "triton": xla_linear}
# Of those that may be unusable: why this one is here, empty if it is not.
PROBLEMS = {"native": native.problem}


def problems() -> dict[str, str]:
    """Every implementation, and why it cannot be used here: empty if it can."""
    return dispatch.problems(IMPLEMENTATIONS, PROBLEMS)


def linear(x: jax.Array, kernel: jax.Array | Member, parts: int = 1, implementation: str | None = None) -> jax.Array:
    """``x @ kernel.T`` of ``x`` float32[..., K] with bfloat16 numbers, given as their bits: float32[..., N].

    ``kernel`` uint16[N, K], or a member of a stack of such. Differentiable by ``x`` (reverse mode). ``parts``: equal
    parts of the rows, one after another, where a float32 copy of the whole matrix would be too large; a backend without
    such copies ignores it. ``implementation`` None: :func:`pallas_kernels.chosen_kernels`. Raises ValueError for an
    implementation that is unknown or unavailable.
    """
    name = dispatch.choose("linear", implementation, IMPLEMENTATIONS, PROBLEMS)
    if not isinstance(kernel, Member):
        kernel = Member(kernel[None], jnp.int32(0))
    return dispatch.call(name, IMPLEMENTATIONS, (x, kernel), parts)

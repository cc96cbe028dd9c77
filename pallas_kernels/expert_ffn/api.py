"""Public op and dispatch: ``implementation=None`` takes :func:`pallas_kernels.chosen_kernels`; nothing falls back."""

from functools import partial

import jax

from pallas_kernels import dispatch, gpu, native
from pallas_kernels.expert_ffn import triton
from pallas_kernels.expert_ffn.native import native_expert_ffn
from pallas_kernels.expert_ffn.pallas_gpu import pallas_expert_ffn
from pallas_kernels.expert_ffn.reference import ACTIVATIONS, paged_expert_ffn
from pallas_kernels.pages import Geometry

IMPLEMENTATIONS = {
    "xla": paged_expert_ffn,
    "native": native_expert_ffn,
    "pallas": pallas_expert_ffn,
    "triton": triton.triton_expert_ffn,
}
# Of those that may be unusable: why this one is here, empty if it is not.
PROBLEMS = {"native": native.problem, "pallas": gpu.problem, "triton": triton.problem}


def problems() -> dict[str, str]:
    """Every implementation, and why it cannot be used here: empty if it can."""
    return dispatch.problems(IMPLEMENTATIONS, PROBLEMS)


def expert_ffn(
    x: jax.Array,
    experts_of: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    arena: jax.Array,
    bits: jax.Array,
    pages: jax.Array,
    geometry: Geometry,
    implementation: str | None = None,
    activation: str = "silu",
    moments: bool = False,
) -> tuple[jax.Array, ...]:
    """Routed experts of one layer at any mix of bits.

    ``x`` float32[T, H]; ``experts_of`` int32[T, k]; ``gates`` float32[T, k]; ``valid`` bool[T] (masked tokens
    cost nothing and give 0); ``arena`` uint32[num_pages, page_words]; ``bits`` int32[E, 2];
    ``pages`` int32[E, 2, S]; ``activation`` a name in ``ACTIVATIONS``. Returns ``(y float32[T, H], stats
    float32[T, k, 2])``, stats being the squared norms of both blocks' inputs; with ``moments`` also ``(float32[E, H],
    float32[E, I])``, sums of ``gate^2 * input^2`` over an expert's tokens for both blocks. ``y`` and stats are
    differentiable by ``x`` and ``gates`` (reverse mode). ``implementation`` None:
    :func:`pallas_kernels.chosen_kernels`. Raises ValueError for an implementation that is unknown or unavailable and
    for an unknown ``activation``.
    """
    name = dispatch.choose("expert_ffn", implementation, IMPLEMENTATIONS, PROBLEMS)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose from {', '.join(ACTIVATIONS)}")
    read = x, experts_of, gates, valid, arena, bits, pages
    return _expert_ffn(geometry, name, native.exact(), activation, moments, *read)


# What the environment says is an argument: JAX keeps what it has traced.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _expert_ffn(geometry, name, exact, activation, moments, *read):
    implementations = IMPLEMENTATIONS | {"native": partial(native_expert_ffn, exact=exact)}
    return dispatch.call(name, implementations, read, geometry, activation, moments)


def _forward(*static_and_read):
    return _expert_ffn(*static_and_read), static_and_read[5:]


def _backward(geometry, name, exact, activation, moments, read, cotangents):
    """Cotangents of ``x`` and ``gates``, on the XLA path whatever the forward ran on; the weights are constants.

    The forward is computed again: what it would have kept is a dequantized copy of every expert in use.
    """
    x, experts_of, gates, valid, arena, bits, pages = read

    def forward(x, gates):
        return paged_expert_ffn(x, experts_of, gates, valid, arena, bits, pages, geometry, activation)

    _, pull = jax.vjp(forward, x, gates)
    grad_x, grad_gates = pull(cotangents[:2])
    return grad_x, None, grad_gates, None, None, None, None


_expert_ffn.defvjp(_forward, _backward)

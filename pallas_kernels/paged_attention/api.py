"""Public op and dispatch: ``implementation=None`` takes :func:`pallas_kernels.chosen_kernels`; nothing falls back."""

import jax

from pallas_kernels import dispatch, gpu, native
from pallas_kernels.paged_attention.native import native_paged_attention
from pallas_kernels.paged_attention.pallas_gpu import pallas_paged_attention
from pallas_kernels.paged_attention.reference import Past, reference_paged_attention

IMPLEMENTATIONS = {
    "xla": reference_paged_attention,
    "native": native_paged_attention,
    "pallas": pallas_paged_attention,
}
# Of those that may be unusable: why this one is here, empty if it is not.
PROBLEMS = {"native": native.problem, "pallas": gpu.problem}


def problems() -> dict[str, str]:
    """Every implementation, and why it cannot be used here: empty if it can."""
    return dispatch.problems(IMPLEMENTATIONS, PROBLEMS)


def paged_attention(
    q: jax.Array,
    fresh_k: jax.Array,
    fresh_v: jax.Array,
    fresh_start: jax.Array | int,
    past: Past | None,
    layer: jax.Array | int,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of T queries a slot over its past pages and the fresh tokens of this dispatch.

    ``q`` float32[B, T, heads, D], already scaled; query ``t`` sees fresh tokens ``0..fresh_start+t``.
    ``fresh_k``, ``fresh_v`` [B, F, kv_heads, D] in the cache dtype; ``past`` None means no past at all.
    ``window``: a query sees that many tokens at most, itself included. Returns float32[B, T, heads * D]; without a past
    it is differentiable by queries, keys and values (reverse mode). ``implementation`` None:
    :func:`pallas_kernels.chosen_kernels`. Raises ValueError for an implementation that is unknown or unavailable.
    """
    name = dispatch.choose("paged_attention", implementation, IMPLEMENTATIONS, PROBLEMS)
    return dispatch.call(name, IMPLEMENTATIONS, (q, fresh_k, fresh_v, fresh_start, past, layer), window)

"""Expert feed-forward in C++ on CPUs: planes are decoded in registers, threads split output rows."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.pages import Geometry

# Activations by the number that the C++ side knows them by.
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


def native_expert_ffn(
    x: jax.Array,
    experts_of: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    arena: jax.Array,
    bits: jax.Array,
    pages: jax.Array,
    geometry: Geometry,
    activation: str = "silu",
    moments: bool = False,
    exact: bool = False,
) -> tuple[jax.Array, ...]:
    """Expert feed-forward as :func:`pallas_kernels.expert_ffn.reference.paged_expert_ffn`, one custom call.

    Sums are float32; inputs of products and entries of tables are rounded to bfloat16 where the processor multiplies
    that, unless they are to be ``exact``. A row of the result depends on its token alone, bit for bit, whatever is
    computed beside it. A page, expert or width out of range is an error of the call where the reference reads something
    else.
    """
    library, _ = native.load()
    assert library is not None, "the dispatcher asks problem() first"
    (tokens, hidden), top_k, experts, inner = x.shape, experts_of.shape[1], bits.shape[0], geometry.down.cols
    kept = experts if moments else 0
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    shape = lambda block: np.array([block.rows, block.cols, block.lut_rows], np.int64)  # noqa: E731
    call = jax.ffi.ffi_call(
        "pwjax_expert_ffn",
        (
            f32(tokens, hidden),
            f32(tokens, top_k, 2),
            f32(kept, hidden),
            f32(kept, inner),
            # An output, so that XLA's figures of the program's memory count it.
            f32(library.pwjax_expert_ffn_scratch(tokens, top_k, hidden, inner)),
        ),
        vmap_method="sequential",
    )
    y, stats, outer_moments, inner_moments, _ = call(
        x, experts_of, gates, valid, arena, bits, pages,
        widths=np.array([geometry.widths[0], geometry.parent, geometry.fallback], np.int64),
        gate_up=shape(geometry.gate_up),
        down=shape(geometry.down),
        activation=np.int64(ACTIVATIONS[activation]),
        exact=exact,
    )  # fmt: skip
    return (y, stats, (outer_moments, inner_moments)) if moments else (y, stats)

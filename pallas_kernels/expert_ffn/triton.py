"""Expert feed-forward on GPUs through jax-triton: the decode product in Triton's own language.

A second way to the same machine code, should Pallas lose its Triton backend. Programs of many choices an expert take
the XLA reference, so that nothing here needs Pallas.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.expert_ffn import triton_kernel
from pallas_kernels.expert_ffn.gpu_ffn import by_column, feed_forward, stream_rows
from pallas_kernels.expert_ffn.reference import paged_expert_ffn
from pallas_kernels.expert_ffn.tuning import Blocks, blocks_for
from pallas_kernels.pages import MATRICES, Geometry, ceil_div

# ``launch(inputs, out_shape, grid, name, warps, constants)``: runs :func:`.triton_kernel.stream`.
Launch = Callable[[tuple, jax.ShapeDtypeStruct, tuple[int, int], str, int, dict[str, Any]], jax.Array]


def problem() -> str:
    """Why this backend cannot be used here; empty if it can."""
    if why := gpu.problem() or gpu.triton_problem(gpu.triton_versions()):
        return why
    try:
        _jax_triton()
    except ImportError as error:
        return f"jax-triton cannot be imported: {error}"
    return ""


def triton_expert_ffn(
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
    *,
    blocks: Blocks | None = None,
    launch: Launch | None = None,
) -> tuple[jax.Array, ...]:
    """Expert feed-forward as :func:`pallas_kernels.expert_ffn.reference.paged_expert_ffn`.

    ``blocks``: sizes of the kernels, by default what ``tuned.json`` has for these shapes. ``launch``: by default
    jax-triton's; tests run the kernel in Triton's interpreter.
    """
    blocks, experts = blocks or blocks_for(geometry), bits.shape[0]
    rows = stream_rows(*experts_of.shape, experts, blocks)
    if not rows:
        return paged_expert_ffn(x, experts_of, gates, valid, arena, bits, pages, geometry, activation, moments)

    def product(x, source, groups, matrix):
        words = blocks.words[matrix]
        given = constants(geometry, matrix, source.shape[1], pages.shape[2], activation, blocks)
        tiles, columns = len(source), blocks.rows // (2 - matrix)
        return (launch or _launch)(
            (groups.expert, groups.used.reshape(1), source, by_column(x, words), arena, bits, pages),
            jax.ShapeDtypeStruct((*source.shape, given["OUTPUTS"]), jnp.float32),
            (tiles, ceil_div(given["OUTPUTS"], columns)),
            f"pwjax_triton_{MATRICES[matrix]}",
            blocks.warps,
            given,
        )

    return feed_forward(product, rows, x, experts_of, gates, valid, experts, moments)


def constants(
    geometry: Geometry, matrix: int, tokens: int, slots: int, activation: str, blocks: Blocks
) -> dict[str, Any]:
    """Constants of :func:`.triton_kernel.stream` for tiles of ``tokens`` choices and page tables of ``slots``."""
    shape, words = geometry.shape(matrix), blocks.words[matrix]
    return {
        "TOKENS": tokens,
        "ROWS": blocks.rows,
        "WORDS": words,
        "X_WORDS": ceil_div(shape.plane_row_words, words) * words,
        "MATRIX": matrix,
        "OUTPUTS": shape.rows // (2 - matrix),
        "SLOTS": slots,
        "PAGE_WORDS": geometry.page_words,
        "LOWEST": geometry.widths[0],
        "HIGHEST": geometry.parent,
        "FALLBACK": geometry.fallback,
        "LUT_ROWS": shape.lut_rows,
        "PLANE_WORDS": shape.plane_row_words,
        "DENSE_WORDS": shape.dense_row_words,
        "REGISTER_BITS": blocks.register_bits,
        "GELU": activation == "gelu_pytorch_tanh",
        "EMULATED": False,
    }


@cache
def _jax_triton():
    # jax-triton 0.3.1 empties this setting when it is imported, and whatever else uses Triton then has no cache.
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
        else:
            os.environ.pop("TRITON_CACHE_DIR", None)
    return jax_triton


def _launch(inputs, out_shape, grid, name, warps, constants):
    return _jax_triton().triton_call(
        *inputs,
        kernel=triton_kernel.compiled(),
        out_shape=out_shape,
        grid=grid,
        name=name,
        num_warps=warps,
        num_stages=1,
        **constants,
    )

"""GPU kernels at real sizes become machine code that spills nothing and spends few instructions on a weight.

Needs Triton, no GPU: ``pytest -m cubin``. XLA brings a Triton of its own, so the figures are near, not exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from gpu_compile import LANES, kernels, lower, machine_code

from pallas_kernels.expert_ffn.pallas_gpu import pallas_expert_ffn
from pallas_kernels.expert_ffn.tuning import blocks_for
from pallas_kernels.paged_attention import Past
from pallas_kernels.paged_attention.pallas_gpu import pallas_paged_attention
from pallas_kernels.pages import BlockShape, Geometry

pytestmark = [pytest.mark.cubin, pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")]
spec = jax.ShapeDtypeStruct
# Hidden and inner size, experts, choices of a token.
QWEN, MIXTRAL, GEMMA = (2048, 1408, 60, 4), (4096, 14336, 8, 2), (2816, 704, 128, 8)


def compiled(shape, tokens, widths, fallback, capability=90, num_pages=200_000):
    """Machine code of every kernel of one expert_ffn, by name."""
    hidden, inner, experts, k = shape
    blocks = BlockShape(2 * inner, hidden, 4), BlockShape(hidden, inner, 4)
    geometry = Geometry(11264, widths, fallback, *blocks)
    args = (
        spec((tokens, hidden), jnp.float32), spec((tokens, k), jnp.int32), spec((tokens, k), jnp.float32),
        spec((tokens,), jnp.bool_), spec((num_pages, geometry.page_words), jnp.uint32),
        spec((experts, 2), jnp.int32), spec((experts, 2, geometry.slots), jnp.int32),
    )  # fmt: skip
    found = kernels(lower(partial(pallas_expert_ffn, geometry=geometry), *args))
    return geometry, {kernel.name: (kernel, machine_code(kernel, capability)) for kernel in found}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", [QWEN, GEMMA], ids=["qwen", "gemma"])
def test_a_decode_program_spills_nothing(shape, capability):
    _, found = compiled(shape, 1, (2, 3, 4, 5, 6), True, capability)
    assert found.keys() == {"pwjax_stream_gate_up", "pwjax_stream_down"}
    for kernel, code in found.values():
        # Pages lie further apart than 32 bits of words reach.
        assert "i64" in kernel.ttir
        assert code.stack_bytes == 0 and code.registers <= 200, (kernel.name, code)


# Instructions of the inner loop for each weight, one token: above the measured figures by a tenth at most.
@pytest.mark.parametrize(("bits", "ceiling"), [(2, 5.0), (3, 5.4), (4, 7.0), (5, 9.5), (6, 16.0), (8, 18.0)])
def test_instructions_of_a_weight(bits, ceiling):
    geometry, found = compiled(QWEN, 1, (bits,), False)
    blocks = blocks_for(geometry)
    for matrix, name in enumerate(("pwjax_stream_gate_up", "pwjax_stream_down")):
        kernel, code = found[name]
        weights = blocks.rows * blocks.words[matrix] * 32 / (kernel.warps * LANES)
        print(bits, name, round(max(code.loops) / weights, 2), code)
        assert max(code.loops) / weights <= ceiling, (name, code)


def test_a_prompt_program_spills_nothing():
    _, found = compiled(QWEN, 512, (4,), True)
    assert {name.split("_")[1] for name in found} == {"dequantize", "product"}
    for kernel, code in found.values():
        assert code.stack_bytes == 0, (kernel.name, code)


def test_a_small_arena_needs_no_wide_addresses():
    _, found = compiled(QWEN, 1, (3,), False, num_pages=100)
    assert all("i64" not in kernel.ttir for kernel, _ in found.values())


# Slots, queries, heads, KV heads, head size, window: Qwen1.5-MoE, Mixtral, Gemma 4's sliding and global layers.
@pytest.mark.parametrize(
    "shape",
    [(8, 1, 16, 16, 128, None), (1, 256, 32, 8, 128, None), (8, 1, 16, 8, 256, 1024), (1, 256, 16, 2, 512, None)],
)
def test_attention_spills_nothing(shape):
    slots, queries, heads, kv_heads, dim, window = shape
    past = Past(spec((200_000, 11264), jnp.uint32), spec((slots, 4, 2, 64), jnp.int32), spec((slots,), jnp.int32))
    fresh = spec((slots, max(queries, 8), kv_heads, dim), jnp.bfloat16)
    attend = partial(pallas_paged_attention, window=window)
    scalar = spec((), jnp.int32)
    lowered = lower(attend, spec((slots, queries, heads, dim), jnp.float32), fresh, fresh, scalar, past, scalar)
    [kernel] = kernels(lowered)
    code = machine_code(kernel, 90)
    print(shape, code)
    assert "i64" in kernel.ttir and code.stack_bytes == 0, code

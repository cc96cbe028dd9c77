"""GPU kernels at real sizes become machine code that spills nothing and spends few instructions on a weight.

Needs Triton, no GPU: ``pytest -m cubin``. XLA brings a Triton of its own, so the figures are near, not exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from gpu_compile import LANES, compiled, kernels, lower, machine_code

from pallas_kernels.expert_ffn import triton, triton_kernel
from pallas_kernels.expert_ffn.pallas_gpu import pallas_expert_ffn
from pallas_kernels.expert_ffn.tuning import blocks_for
from pallas_kernels.paged_attention import Past
from pallas_kernels.paged_attention.pallas_gpu import pallas_paged_attention
from pallas_kernels.pages import BlockShape, Geometry

pytestmark = [pytest.mark.cubin, pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")]
spec = jax.ShapeDtypeStruct
# Hidden and inner size, experts, choices of a token.
QWEN, MIXTRAL, GEMMA = (2048, 1408, 60, 4), (4096, 14336, 8, 2), (2816, 704, 128, 8)


def geometry_of(shape, widths, fallback):
    hidden, inner, *_ = shape
    return Geometry(11264, widths, fallback, BlockShape(2 * inner, hidden, 4), BlockShape(hidden, inner, 4))


def programs(shape, tokens, widths, fallback, capability=90, num_pages=200_000):
    """Machine code of every kernel of one expert_ffn, by name."""
    hidden, _, experts, k = shape
    geometry = geometry_of(shape, widths, fallback)
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
    _, found = programs(shape, 1, (2, 3, 4, 5, 6), True, capability)
    assert found.keys() == {"pwjax_stream_gate_up", "pwjax_stream_down"}
    for kernel, code in found.values():
        # Pages lie further apart than 32 bits of words reach.
        assert "i64" in kernel.ttir
        print(capability, kernel.name, code)
        assert code.stack_bytes == 0 and code.registers <= 208, (kernel.name, code)


# Instructions for each weight, one token, of the loop over words and the loop over quarters of their columns in it:
# above the measured figures by a tenth at most. Pallas's, then jax-triton's, which reads tables by pointer.
CEILINGS = [(2, 5.0, 4.9), (3, 5.4, 5.4), (4, 7.0, 7.0), (5, 9.9, 9.8), (6, 17.2, 15.5), (8, 19.2, 17.8)]


def instructions(geometry, matrix, code):
    blocks = blocks_for(geometry)
    return code.nested(4) / (blocks.rows * blocks.words[matrix] * 32 / (blocks.warps * LANES))


@pytest.mark.parametrize(("bits", "ceiling"), [(bits, pallas) for bits, pallas, _ in CEILINGS])
def test_instructions_of_a_weight(bits, ceiling):
    geometry, found = programs(QWEN, 1, (bits,), False)
    for matrix, name in enumerate(("pwjax_stream_gate_up", "pwjax_stream_down")):
        code = found[name][1]
        print(bits, name, round(instructions(geometry, matrix, code), 2), code)
        assert instructions(geometry, matrix, code) <= ceiling, (name, code)


def triton_code(geometry, matrix, tokens, capability=90):
    """The jax-triton kernel, as jax-triton has it compiled: every array begins at a multiple of 16 bytes."""
    from triton.compiler import ASTSource

    blocks = blocks_for(geometry)
    given = triton.constants(geometry, matrix, tokens, geometry.slots, "silu", blocks)
    kernel, of = triton_kernel.compiled(), {"x_ptr": "*fp32", "arena_ptr": "*u32", "out_ptr": "*fp32"}
    signature = {name: "constexpr" if name in given else of.get(name, "*i32") for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    return compiled(ASTSource(kernel, signature, given, attrs), capability, blocks.warps, 1)


@pytest.mark.parametrize(("bits", "ceiling"), [(bits, triton) for bits, _, triton in CEILINGS])
def test_instructions_of_a_weight_in_triton(bits, ceiling):
    geometry = geometry_of(QWEN, (bits,), False)
    for matrix in (0, 1):
        code = triton_code(geometry, matrix, 1)
        print(bits, matrix, round(instructions(geometry, matrix, code), 2), code)
        assert instructions(geometry, matrix, code) <= ceiling, code


# Many sums at once with the width alone that keeps most in registers: all of them take a minute to compile.
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("tokens", "widths", "registers"), [(1, (2, 3, 4, 5, 6), 208), (8, (5,), 255)], ids=["one", "eight"]
)
def test_the_triton_kernel_spills_nothing(tokens, widths, registers, capability):
    for matrix in (0, 1):
        code = triton_code(geometry_of(QWEN, widths, True), matrix, tokens, capability)
        print(tokens, matrix, code)
        assert code.stack_bytes == 0 and code.registers <= registers, code


def test_a_prompt_program_spills_nothing():
    _, found = programs(QWEN, 512, (4,), True)
    assert {name.split("_")[1] for name in found} == {"dequantize", "product"}
    for kernel, code in found.values():
        assert code.stack_bytes == 0, (kernel.name, code)


def test_a_small_arena_needs_no_wide_addresses():
    _, found = programs(QWEN, 1, (3,), False, num_pages=100)
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

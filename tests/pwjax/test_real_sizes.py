"""One layer of each published model at its real size: blocks of all widths read through pages equal whole weights.

Random weights and fewer experts than the model has, to fit time and memory; every matrix has its real shape, and pages
and LUT groups are those of ``pwjax plan --preset``.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from calib.anyprecision import QuantizedBlock, dequantize
from pallas_kernels import bitplanes
from pwjax import models
from pwjax.byte_table import expected_geometry
from pwjax.checkpoints.tree import param_shapes, unflatten
from pwjax.models.layer import decoder_layer, layer_params, whole_sequences
from pwjax.presets import preset
from pwjax.resident import Model, Resident

EXPERTS = {"qwen1.5-moe-a2.7b": 4, "mixtral-8x7b": 2, "gemma-4-26b-a4b": 4}
# Hidden and intermediate size: what a row of gate_up and of down holds.
BF16 = ml_dtypes.bfloat16
COLUMNS = {"qwen1.5-moe-a2.7b": (2048, 1408), "mixtral-8x7b": (4096, 14336), "gemma-4-26b-a4b": (2816, 704)}


def nested_block(shape, widths, rng):
    """Random codes; tables at fewer bits are the means of those at more.

    Centroids have the digits of bfloat16 and scales are powers of two, so that weights at every width are bfloat16:
    the dense form then holds them in half the memory, one expert in float32 at a time.
    """
    codes = rng.integers(0, 1 << widths[-1], (shape.rows, shape.cols), np.uint8)
    table = np.sort(rng.standard_normal((shape.groups, 1 << widths[-1]), np.float32), axis=1) * shape.cols**-0.5
    luts = {b: table.reshape(shape.groups, 1 << b, -1).mean(-1).astype(BF16).astype(np.float16) for b in widths}
    return QuantizedBlock(codes, luts, rng.choice([0.5, 1, 2], shape.rows).astype(np.float16))


def random(name, shape, rng):
    """Matrices that keep the size of what they multiply, scales around 1, small biases."""
    vector = name.endswith(("scale", "scalar", "bias"))
    values = rng.standard_normal(shape, np.float32) * (0.1 if vector else shape[-1] ** -0.5)
    return values + name.endswith(("scale", "scalar"))


@pytest.fixture(params=EXPERTS)
def real_layer(request):
    """``(config, resident model, quantized blocks, bfloat16 originals)`` of one layer."""
    name, rng = request.param, np.random.default_rng(0)
    geometry = expected_geometry(preset(name))
    assert (geometry.gate_up.cols, geometry.down.cols) == COLUMNS[name]
    config = replace(preset(name), num_layers=1, num_experts=EXPERTS[name], top_k=2, vocab_size=8)
    flat = {n: random(n, s, rng) for n, s in param_shapes(config).items() if "/experts/" not in n}
    blocks, originals, pages = [], [], [np.zeros((1, geometry.page_words), np.uint32)]
    for matrix in [0, 1] * config.num_experts:
        shape = geometry.shape(matrix)
        blocks.append(nested_block(shape, geometry.widths, rng))
        # Unlike the widest width, or reading one for the other would not show.
        originals.append((1.1 * dequantize(blocks[-1], geometry.parent)).astype(BF16))
        pages.append(bitplanes.block_pages(blocks[-1], originals[-1], geometry, matrix))
    arena = jnp.asarray(np.concatenate(pages))
    return config, Resident(Model(config, geometry), unflatten(flat), arena), blocks, originals


def whole(blocks, originals, bits, matrix):
    """Weights of one matrix of all experts, uint16[E, N, K]: the bits of bfloat16."""
    out = []
    for block, original, b in list(zip(blocks, originals, bits, strict=True))[matrix::2]:
        value = original
        if b != 16:
            exact = dequantize(block, b)
            value = exact.astype(BF16)
            assert np.array_equal(value[0].astype(np.float32), exact[0])
        out.append(value.view(np.uint16))
    return jnp.asarray(np.stack(out))


def apart(left, right):
    """Largest difference, of the size of ``right``."""
    left, right = np.asarray(left), np.asarray(right)
    return np.abs(left - right).max() / np.abs(right).max()


@pytest.mark.slow
def test_a_layer_of_real_size_in_pages_equals_whole_weights(exact_activations, real_layer):
    config, resident, blocks, originals = real_layer
    geometry, kind = resident.model.geometry, config.attention_kinds[config.layer_kinds[0]]
    own = layer_params(config, resident.params["layers"], 0, experts=False)

    @jax.jit
    def run(own, experts, x, paged):
        positions = jnp.arange(x.shape[1])[None]
        own = own if experts is None else {**own, "experts": experts}
        out = decoder_layer(config, kind, own, x, positions, positions >= 0, whole_sequences(kind), paged)
        return out.x, out.trace, out.stats

    def paged(bits):
        table = resident.table(bits)
        return models.Paged(resident.arena, table.bits[0], table.pages[0], geometry)

    seen = set()
    for turn, tokens in enumerate((1, 4, 64)):
        # Neighbours differ, and the three turns bring every width to some block of each matrix.
        expert, matrix = np.divmod(np.arange(len(blocks)), 2)
        bits = np.array(geometry.all_bits)[(turn * config.num_experts + expert + 3 * matrix) % 6]
        seen |= {(b % 2, int(w)) for b, w in enumerate(bits)}
        experts = {"gate_up": whole(blocks, originals, bits, 0), "down": whole(blocks, originals, bits, 1)}
        x = np.random.default_rng(tokens).standard_normal((1, tokens, config.hidden_size), np.float32)
        want, want_trace, _ = run(own, experts, x, None)
        got, got_trace, stats = run(own, None, x, paged(bits))
        np.testing.assert_array_equal(got_trace.experts, want_trace.experts)
        assert float(stats.count.sum()) == 2 * tokens
        error = apart(got, want)
        print(f"{config.model_type} M={tokens} bits={bits.tolist()}: {error:.1e}")
        assert error < 1e-5
        if tokens == 1:  # other widths, and nothing else, show
            assert apart(run(own, None, x, paged(np.roll(bits, 2)))[0], want) > 1e-3
    assert seen == {(matrix, bits) for matrix in (0, 1) for bits in geometry.all_bits}

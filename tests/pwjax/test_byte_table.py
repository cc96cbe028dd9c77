"""Bytes from a configuration alone: the published counts of three models, and the engine's own allocation."""

import ml_dtypes
import numpy as np
import pytest

from pwjax import byte_table
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.tree import param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import UsageError
from pwjax.presets import PRESETS, preset
from pwjax.quantization import quantize

# Per model: weights of all experts, MB of one expert at 3, 4, 5, 6 and 16 bits (planes and the LUT of that width), GB
# of the planes of all experts at 3 to 6 bits, GB of everything else in bfloat16, all weights, KV bytes a token.
PUBLISHED = {
    "qwen1.5-moe-a2.7b": (
        24 * 60 * 8.651e6, [3.32, 4.48, 5.72, 7.11, 17.30], [4.67, 6.23, 7.79, 9.34], 3.72, 14.31e9, {None: 196_608}
    ),
    "mixtral-8x7b": (
        32 * 8 * 176.16e6, [66.6, 89.1, 112.2, 136.3, 352.3], [16.9, 22.6, 28.2, 33.8], 3.21, 46.70e9, {None: 131_072}
    ),
    "gemma-4-26b-a4b": (
        30 * 128 * 5.947e6, [2.30, 3.11, 3.99, 5.00, 11.90], [8.56, 11.4, 14.3, 17.1], 4.79, 25.22e9,
        {1024: 204_800, None: 20_480},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_published_counts(name):
    experts, each_mb, planes_gb, dense_gb, weights, kv = PUBLISHED[name]
    config = preset(name)
    near = lambda value: pytest.approx(value, rel=5e-3)  # noqa: E731
    assert config.expert_params == near(experts)
    assert config.expert_params + sum(byte_table.dense_bytes(config).values()) / 2 == near(weights)
    assert sum(byte_table.dense_bytes(config).values()) == near(dense_gb * 1e9)
    count = config.num_layers * config.num_experts
    for bits, wanted in zip((3, 4, 5, 6, 16), each_mb, strict=True):
        assert sum(byte_table.plain_bytes(config, bits).values()) / count == near(wanted * 1e6)
    for bits, wanted in zip((3, 4, 5, 6), planes_gb, strict=True):
        assert byte_table.plain_bytes(config, bits)["planes"] == near(wanted * 1e9)
    kinds = byte_table.kv_kinds(config)
    assert {kind.window: kind.token_bytes for kind in kinds} == kv
    assert sum(kind.layers for kind in kinds) == config.num_layers
    assert {k.window: 2 * k.token_bytes for k in kinds} == {
        k.window: k.token_bytes for k in byte_table.kv_kinds(config, "float32")
    }


def test_a_window_bounds_the_cache():
    sliding, full = byte_table.kv_kinds(preset("gemma-4-26b-a4b"))
    assert sliding.sequence_bytes(262_144) == sliding.sequence_bytes(1024) == 1024 * 204_800  # 210 MB
    assert full.sequence_bytes(262_144) == 262_144 * 20_480


def test_unknown_preset():
    with pytest.raises(UsageError, match="unknown preset 'gpt'; choose from qwen1.5-moe-a2.7b, mixtral-8x7b, gemma-4"):
        preset("gpt")


# Shapes in the proportions of the three models: wide and narrow experts, a column count that fills no word, three
# matrices of different row counts.
SHAPES = {
    "qwen1.5-moe-a2.7b": {"hidden_size": 64, "expert_size": 44},
    "mixtral-8x7b": {"hidden_size": 32, "expert_size": 112},
    "gemma-4-26b-a4b": {"hidden_size": 88, "expert_size": 22},
}


@pytest.mark.parametrize("name", PRESETS)
def test_whole_pages_are_what_the_engine_allocates(tmp_path, name):
    from pwjax.engine.weights import load_weights

    config = ModelConfig(
        model_type="qwen2_moe", vocab_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=2,
        top_k=1, shared_size=0, norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e4, max_positions=16,
        tie_embeddings=True, qkv_bias=False, **SHAPES[name],
    )  # fmt: skip
    geometry = byte_table.expected_geometry(config, (2, 3))
    rng = np.random.default_rng(1)
    params = {n: rng.normal(0, 1, s).astype(ml_dtypes.bfloat16) for n, s in param_shapes(config).items()}
    groups = (geometry.gate_up.lut_rows, geometry.down.lut_rows)
    made = quantize(unflatten(params), config, tmp_path / "m.pw", bits="2-3", lut_rows=groups)
    artifact = Artifact.open(made)
    assert artifact.geometry == geometry
    expected = byte_table.Unquantized(config, geometry)
    assert np.array_equal(expected.table().pages, artifact.table().pages)
    for bits in (2, 3, 16):
        wanted = sum(byte_table.paged_bytes(config, geometry, bits).values())
        assert artifact.table().total_pages(bits) * geometry.page_bytes == wanted
        pages = int(artifact.table().total_pages(bits))
        weights = load_weights(artifact, np.full(config.blocks, bits), pages + 1, 64)
        try:
            assert weights.allocator.used_pages * geometry.page_bytes == wanted
        finally:
            weights.close()
    dense = sum(a.nbytes for a in _leaves(artifact.dense_params()))
    assert dense == sum(byte_table.dense_bytes(config).values())


def _leaves(tree):
    for value in tree.values():
        yield from _leaves(value) if isinstance(value, dict) else [value]

"""Parameters layer by layer: the same from memory, a checkpoint and an artifact, with one layer in memory."""

import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import HFCheckpoint, save_hf
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tree import flatten, param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError
from pwjax.quantization import quantize


def same(left, right):
    assert sorted(left) == sorted(right)
    for name in left:
        assert left[name].dtype == ml_dtypes.bfloat16 and left[name].tobytes() == right[name].tobytes(), name


def test_three_sources_agree(tmp_path, tiny_config, tiny_params, tiny_artifact):
    save_hf(tmp_path / "hf", tiny_config, tiny_params)
    memory = ParamSource(tiny_config, flatten(tiny_params))
    artifact = Artifact.open(tiny_artifact)
    for other in (HFCheckpoint(tmp_path / "hf").source(), artifact.source()):
        same(memory.outer(), other.outer())
        for layer in range(tiny_config.num_layers):
            same(memory.layer(layer), other.layer(layer))
        assert {n: v.shape for n, v in flatten(other.tree()).items()} == param_shapes(tiny_config)
    wanted = artifact.expert_params(3)["down"][1].astype(ml_dtypes.bfloat16)
    assert artifact.source(3).layer(1)["layers/experts/down"].tobytes() == wanted.tobytes()
    exact = artifact.source(3, np.float32).layer(1)["layers/experts/down"]
    assert exact.dtype == np.float32 and np.array_equal(exact, artifact.expert_params(3)["down"][1])
    with pytest.raises(ArtifactError, match="has no 7 bits; choose from 2, 3"):
        artifact.source(7)


def test_writing_a_checkpoint_holds_one_layer(tmp_path):
    config = ModelConfig(
        model_type="qwen2_moe", vocab_size=64, hidden_size=128, num_layers=12, num_heads=4, num_kv_heads=4,
        head_dim=64, num_experts=2, top_k=1, expert_size=128, shared_size=128, norm_topk_prob=False, rms_eps=1e-6,
        rope_theta=1e4, max_positions=32, tie_embeddings=False, qkv_bias=True,
    )  # fmt: skip
    shapes = param_shapes(config)
    rng = np.random.default_rng(0)
    params = {n: rng.normal(0, 0.1, s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    save_hf(tmp_path / "hf", config, unflatten(params))
    total_bytes = sum(v.nbytes for v in params.values())
    layer_bytes = sum(v.nbytes for n, v in params.items() if n.startswith("layers/")) // config.num_layers
    outer_bytes = total_bytes - layer_bytes * config.num_layers
    del params
    # Twice for a copy on its way, and what names and headers of all tensors need.
    allowed = 2 * (layer_bytes + outer_bytes) + (256 << 10)
    assert allowed < total_bytes / 2
    tracemalloc.start()
    try:
        save_hf(tmp_path / "again", config, HFCheckpoint(tmp_path / "hf").source().tree())
        assert tracemalloc.get_traced_memory()[1] < allowed
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_quantizing_a_checkpoint_takes_no_more_memory_for_more_layers(tmp_path, tiny_config):
    rng = np.random.default_rng(0)
    peaks, layer_bytes = [], 0
    for layers in (2, 12):
        # So large that a layer's weights weigh more than the names and shapes of ten.
        config = replace(tiny_config, num_layers=layers, hidden_size=128, expert_size=128)
        params = {n: rng.normal(0, 0.1, s).astype(ml_dtypes.bfloat16) for n, s in param_shapes(config).items()}
        layer_bytes = sum(v.nbytes for n, v in params.items() if n.startswith("layers/")) // layers
        folder = save_hf(tmp_path / f"hf{layers}", config, unflatten(params))
        del params
        checkpoint = HFCheckpoint(folder)
        tracemalloc.start()
        try:
            quantize(checkpoint.source().tree(), config, tmp_path / f"{layers}.pw", bits="2", lut_rows=8)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # Ten layers more would be ten times this; damage tables and the report grow a little.
    assert peaks[1] - peaks[0] < layer_bytes, (peaks, layer_bytes)

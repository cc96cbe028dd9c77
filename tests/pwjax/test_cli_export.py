"""``pwjax export``: the original back to the last bit, or what the kernels compute with at fewer bits."""

import json

import ml_dtypes
import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import HFCheckpoint, load_hf, save_hf
from pwjax.checkpoints.tree import EXPERTS, flatten, param_shapes, unflatten
from pwjax.cli import main
from pwjax.config import ModelConfig
from pwjax.quantization import quantize

CONFIG = ModelConfig(
    model_type="qwen2_moe", vocab_size=24, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=3, top_k=2, expert_size=16, shared_size=8, norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e4,
    max_positions=32, tie_embeddings=False, qkv_bias=True, eos_token_ids=(0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    rng = np.random.default_rng(0)
    flat = {n: rng.normal(0, 0.1, s).astype(ml_dtypes.bfloat16) for n, s in param_shapes(CONFIG).items()}
    hf = save_hf(folder / "hf", CONFIG, unflatten(flat))
    return hf, quantize(HFCheckpoint(hf).source().tree(), CONFIG, folder / "model.pw", bits="3-4")


def test_16_bits_are_the_original_file(tmp_path, made, capsys):
    assert main(["export", str(made[1]), str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bits"] == 16 and told["path"] == str(tmp_path / "out")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (made[0] / name).read_bytes()


@pytest.mark.parametrize("bits", [3, 4])
def test_fewer_bits_are_the_dequantized_weights(tmp_path, made, bits):
    assert main(["export", str(made[1]), str(tmp_path / "out"), "--bits", str(bits), "--quiet"]) == 0
    config, params = load_hf(tmp_path / "out")
    original = flatten(load_hf(made[0])[1])
    wanted = Artifact.open(made[1]).expert_params(bits)
    assert config == CONFIG
    for name, value in flatten(params).items():
        if name in EXPERTS:
            assert np.array_equal(value, wanted[name.rsplit("/", 1)[1]].astype(ml_dtypes.bfloat16))
            assert not np.array_equal(value, original[name])
        else:
            assert np.array_equal(value, original[name])


def test_float32_is_exact(tmp_path, made):
    assert main(["export", str(made[1]), str(tmp_path / "out"), "--bits", "3", "--dtype", "float32", "--quiet"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    config, params = load_hf(tmp_path / "out", dtype=np.float32)
    original = flatten(load_hf(made[0], dtype=np.float32)[1])
    experts = {name: Artifact.open(made[1]).expert_params(3)[name.rsplit("/", 1)[1]] for name in EXPERTS}
    assert config == CONFIG
    for name, value in flatten(params).items():
        assert value.dtype == np.float32 and np.array_equal(value, {**original, **experts}[name])


def test_bad_input(tmp_path, made, capsys):
    def told(*words):
        assert main(["export", *map(str, words)]) in (1, 2)
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
        return captured.err

    assert "this model has no 5 bits; choose from 3, 4, 16" in told(made[1], tmp_path / "out", "--bits", 5)
    assert "not an empty directory" in told(made[1], made[0])
    assert "no quantized model at" in told(tmp_path / "none", tmp_path / "out")
    assert "got 0 paths" in told()
    assert "got 3 paths" in told("a", "b", "c")
    assert list(tmp_path.iterdir()) == []

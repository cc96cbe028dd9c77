import json

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.pages import BlockShape, Geometry
from pwjax import cli
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.tree import dense_shapes
from pwjax.checkpoints.writer import ArtifactWriter
from pwjax.config import ModelConfig

CONFIG = ModelConfig(
    model_type="qwen2_moe", vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=3, top_k=2, expert_size=32, shared_size=16, norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e4,
    max_positions=128, tie_embeddings=False, qkv_bias=True,
)
GEOMETRY = Geometry(512, (2, 3, 4), True, BlockShape(64, 32, 8), BlockShape(32, 32, 8))


@pytest.fixture
def artifact(tmp_path):
    with ArtifactWriter(tmp_path / "m.pw", CONFIG, "key") as writer:
        writer.begin(GEOMETRY)
        for layer in range(CONFIG.num_layers):
            with writer.layer(layer) as file:
                file.add(np.zeros((GEOMETRY.host_layer_pages(CONFIG.num_experts), GEOMETRY.page_words), np.uint32))
        dense = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in dense_shapes(CONFIG).items()}
        damage = np.tile([4.0, 2.0, 1.0, 0.0], (CONFIG.blocks, 1))
        tables = {"damage/paper": damage, "routing_mass": np.full((2, 3), 1 / 3)}
        return writer.finish(dense, tables, {"damage": ["paper"]}, {"tokenizer.json": b"{}"})


def run(capsys, *argv):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_summary(capsys, artifact):
    code, out, err = run(capsys, "inspect", str(artifact), "--json")
    summary = json.loads(out)
    assert (code, err) == (0, "")
    assert summary["expert_params"] == CONFIG.expert_params and summary["blocks"] == 12
    by_bits = {row["bits"]: row for row in summary["experts"]}
    assert list(by_bits) == [2, 3, 4, 16]
    pages = sum(GEOMETRY.block_pages(m, 4) for m in (0, 1)) * 6
    assert by_bits[4]["pages"] == pages and by_bits[4]["bytes"] == pages * 2048
    assert by_bits[4]["bits_per_weight"] == pytest.approx(pages * 2048 * 8 / CONFIG.expert_params)
    assert by_bits[2]["damage"] == 48 and by_bits[16]["damage"] == 0
    assert summary["disk_bytes"] == sum(
        p.stat().st_size for p in artifact.rglob("*") if p.is_file() and p.name != "manifest.json"
    )
    code, out, _ = run(capsys, "inspect", str(artifact))
    assert code == 0 and "qwen2_moe, 2 layers" in out and "4 bits" in out and "problem" not in out


def test_verify(capsys, artifact):
    code, out, err = run(capsys, "inspect", str(artifact), "--verify")
    assert code == 0 and "verified: every byte" in out and err == ""
    page_file = artifact / "pages" / "layer_001.bin"
    data = bytearray(page_file.read_bytes())
    data[5000] ^= 1
    page_file.write_bytes(data)
    assert run(capsys, "inspect", str(artifact))[0] == 0  # contents are checked on demand
    code, out, err = run(capsys, "inspect", str(artifact), "--verify", "--json")
    problems = json.loads(out)["problems"]
    assert code == 1 and any("layer_001.bin has 1 corrupted pages: 2" in p for p in problems)
    assert err.startswith("error: ") and "is damaged" in err and err.count("\n") == 1


def test_not_a_model(capsys, tmp_path):
    for path, words in [(tmp_path / "none", "there is no quantized model"), (tmp_path, "is not a quantized model")]:
        code, out, err = run(capsys, "inspect", str(path))
        assert code == 1 and out == "" and words in err and err.count("\n") == 1


def test_artifact_is_opened_once(capsys, artifact, monkeypatch):
    calls = []
    monkeypatch.setattr(Artifact, "verify", lambda self, progress=None: calls.append(self.path) or [])
    assert run(capsys, "inspect", str(artifact), "--verify")[0] == 0 and calls == [artifact]

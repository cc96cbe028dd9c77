"""What quantize accepts: Orbax directories, train states, text with a tokenizer."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pwjax.calibration_text import calibration_text
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.orbax import load_orbax, params_of
from pwjax.checkpoints.tree import flatten, param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError, UsageError
from pwjax.quantization import quantize

CONFIG = ModelConfig(
    model_type="qwen2_moe", vocab_size=30, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=2, top_k=1, expert_size=8, shared_size=0, norm_topk_prob=True, rms_eps=1e-6, rope_theta=1e4,
    max_positions=32, tie_embeddings=True, qkv_bias=False, bos_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return unflatten({n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in param_shapes(CONFIG).items()})


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {chr(97 + i): i + 2 for i in range(26)} | {"[UNK]": 1, "<s>": 0}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return made


def same(left, right):
    left, right = flatten(left), flatten(right)
    assert sorted(left) == sorted(right)
    for name in left:
        assert np.array_equal(np.asarray(left[name], np.float32), np.asarray(right[name], np.float32))


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"params": p, "step": np.int32(3)}])
def test_orbax_checkpoint(tmp_path, params, wrap):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ckpt", wrap(params))
    same(load_orbax(tmp_path / "ckpt"), params)


def test_orbax_manager_gives_the_newest_step(tmp_path, params):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (9, 10):
            state = {"params": {**params, "norm": {"scale": np.full(16, step, np.float32)}}, "count": np.int32(step)}
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    loaded = load_orbax(tmp_path / "run")
    assert loaded["norm"]["scale"][0] == 10
    out = quantize(tmp_path / "run", CONFIG, tmp_path / "out.pw")
    same(Artifact.open(out).dense_params()["norm"], {"scale": np.full(16, 10)})


def test_orbax_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        load_orbax(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="not an Orbax checkpoint"):
        load_orbax(tmp_path)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ckpt", {"weights": np.zeros(3)})
    with pytest.raises(CheckpointError, match="no parameters of this model"):
        load_orbax(tmp_path / "ckpt")


def test_variables_and_states_are_unwrapped(params):
    same(params_of({"params": params}), params)
    same(params_of({"state": {"params": {"params": params}}}), params)
    same(params_of(SimpleNamespace(params={"params": params}, step=1)), params)


def test_half_and_float_trees_are_stored_as_bfloat16(tmp_path, params):
    out = quantize(unflatten({n: v.astype(np.float16) for n, v in flatten(params).items()}), CONFIG, tmp_path / "o")
    assert Artifact.open(out).dense_params()["embed"]["embedding"].dtype == ml_dtypes.bfloat16
    with pytest.raises(CheckpointError, match="norm/scale is int64, not a float"):
        quantize({**params, "norm": {"scale": np.ones(16, int)}}, CONFIG, tmp_path / "p")


@pytest.mark.slow
def test_text_with_a_tokenizer_directory(tmp_path, params, tokenizer):
    folder = tmp_path / "hf"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text("{}")
    (folder / "model.safetensors").write_text("not copied")
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfoxjumpsoverthelazydog" * 3)
    out = quantize(params, CONFIG, tmp_path / "o", text=text, tokenizer=folder, tokens=32, sequence_length=16)
    artifact = Artifact.open(out)
    assert artifact.tokenizer_path == out / "tokenizer.json"
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists() and not (out / "model.safetensors").exists()
    assert artifact.manifest["calibration"]["window_tokens"] == 16
    again = quantize(
        params, CONFIG, tmp_path / "p", text=text.read_text(), tokenizer=folder, tokens=32, sequence_length=16
    )
    assert (again / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()


def test_windows_of_text(tmp_path, tokenizer):
    made = calibration_text(["abcdefgh", "ijklmnop"], CONFIG, tokenizer, sequence_length=5)
    got = made.windows.tokens
    assert made.count == 4 and [s["windows"] for s in made.facts()["texts"]] == [2, 2]
    assert got.tolist() == [[0, 2, 3, 4, 5], [0, 6, 7, 8, 9], [0, 10, 11, 12, 13], [0, 14, 15, 16, 17]]
    kept = Tokenizer.from_str(tokenizer.to_str())
    kept.enable_truncation(3)
    kept.enable_padding(length=7)
    cut = calibration_text(["abcdefgh", "ijklmnop"], CONFIG, kept, sequence_length=5)
    assert cut.windows.tokens.tolist() == made.windows.tokens.tolist() and kept.truncation and kept.padding
    assert calibration_text(np.arange(30), CONFIG, sequence_length=10).windows.tokens.shape == (3, 10)
    whole = calibration_text(list(range(29)) * 3, CONFIG, sequence_length=999).windows
    assert whole.tokens.shape == (2, 32)  # never beyond the model
    few = calibration_text(np.arange(30), CONFIG, tokens=6, sequence_length=3)
    assert few.count == 2 and len(few.windows.tokens) == 4  # twice as many to choose from
    ready = calibration_text(np.arange(20).reshape(2, 10), CONFIG)
    assert ready.windows.tokens.shape == (2, 10) and ready.count == 2
    (tmp_path / "lines.jsonl").write_text('{"text": "abcd"}\n\n{"text": "efgh", "more": 1}\n')
    lines = calibration_text(tmp_path / "lines.jsonl", CONFIG, tokenizer, sequence_length=5)
    assert lines.windows.tokens[0].tolist() == [0, 2, 3, 4, 5]
    (tmp_path / "lines.jsonl").write_text('{"text": "abcd"}\n["efgh"]\n')
    with pytest.raises(UsageError, match='line 2 of .* is not a JSON object with a "text"'):
        calibration_text(tmp_path / "lines.jsonl", CONFIG, tokenizer)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match="is empty"):
        calibration_text(tmp_path / "empty.txt", CONFIG, tokenizer)


def test_expert_that_no_token_reaches_is_named_and_not_free(tmp_path, params):
    router = params["layers"]["router"]["kernel"].copy()
    router[0] = 0
    broken = unflatten(
        {**flatten(params), "layers/router/kernel": router, "embed/embedding": np.ones((30, 16), np.float32)}
    )
    out = quantize(broken, CONFIG, tmp_path / "o", text=np.tile(np.arange(30), 3), tokens=32, sequence_length=16)
    artifact = Artifact.open(out)
    names = artifact.manifest["calibration"]["unrouted"]
    table = artifact.table()
    assert [n for n in names if n.startswith("layer 0")] == ["layer 0 expert 1 gate_up", "layer 0 expert 1 down"]
    assert (table.damage[:, 0] > 0).all() and np.isfinite(table.damage).all() and table.routing_mass[0, 1] == 0
    assert json.loads((out / "manifest.json").read_text())["codes"]

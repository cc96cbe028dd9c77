"""Hugging Face checkpoints: exact round trips, every layout, and every way in which one can be broken."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from pwjax.checkpoints.hf import HFCheckpoint, load_hf, save_hf
from pwjax.checkpoints.hf_files import collapse
from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.tree import flatten, param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError
from pwjax.models import forward, logits
from pwjax.quantization import quantize

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe.npz"
CONFIG = ModelConfig(
    model_type="qwen2_moe", vocab_size=30, hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_size=6, shared_size=10, norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e4,
    max_positions=32, tie_embeddings=False, qkv_bias=True, bos_token_id=None, eos_token_ids=(0,),
)  # fmt: skip
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


def make_params(config, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(0)
    return unflatten({name: rng.normal(0, 0.1, shape).astype(dtype) for name, shape in param_shapes(config).items()})


def same(left, right):
    left, right = flatten(left), flatten(right)
    assert list(left) == list(right)
    for name in left:
        a, b = np.asarray(left[name]), np.asarray(right[name])
        assert a.dtype == b.dtype == ml_dtypes.bfloat16, name
        assert np.array_equal(a.view(np.uint16), b.view(np.uint16)), name


def read(folder):
    return load_file(folder / "model.safetensors")


def write(folder, tensors):
    save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, folder / "model.safetensors")


def shard(folder, count=3):
    """Split ``model.safetensors`` into shards with an index."""
    tensors = read(folder)
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({n: tensors[n] for n in names[i::count]}, folder / file)
        weight_map |= dict.fromkeys(names[i::count], file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    params = make_params(CONFIG)
    return save_hf(tmp_path_factory.mktemp("hf") / "model", CONFIG, params), params


@pytest.fixture
def folder(tmp_path, made):
    return Path(shutil.copytree(made[0], tmp_path / "copy"))


@pytest.fixture
def params(made):
    return made[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "eos_token_ids": (), "norm_topk_prob": True},
        {"shared_size": 0, "qkv_bias": False, "num_kv_heads": 2, "eos_token_ids": (0, 7), "bos_token_id": 3},
    ],
)
def test_round_trip_is_exact(tmp_path, changes):
    config = replace(CONFIG, **changes)
    params = make_params(config)
    # Every bit pattern, NaN and infinities among them, not only common values.
    params["embed"]["embedding"].view(np.uint16)[:] = np.arange(480).reshape(30, 16) * 137
    assert save_hf(tmp_path / "out", config, params) == tmp_path / "out"
    again, loaded = load_hf(tmp_path / "out")
    assert again == config
    same(loaded, params)
    save_hf(tmp_path / "twice", again, loaded)
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "twice").iterdir())
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "twice" / n).read_bytes() for n in names)
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_file_has_hub_names(folder, params):
    tensors = read(folder)
    experts = params["layers"]["experts"]
    assert tensors[GATE].tobytes() == experts["gate_up"][1, 2, :6].tobytes()
    assert tensors[GATE.replace("gate_proj", "up_proj")].tobytes() == experts["gate_up"][1, 2, 6:].tobytes()
    assert tensors[GATE.replace("gate_proj", "down_proj")].tobytes() == experts["down"][1, 2].tobytes()
    assert tensors["model.layers.0.mlp.gate.weight"].shape == (4, 16)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_directory_has_ordinary_permissions(tmp_path, made):
    (tmp_path / "ordinary").mkdir()
    assert made[0].stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_transposed_and_jax_arrays_are_written_in_row_order(tmp_path, params):
    turned = unflatten({n: v.T.copy().T for n, v in flatten(params).items()})
    assert not turned["embed"]["embedding"].flags.c_contiguous
    save_hf(tmp_path / "turned", CONFIG, turned)
    same(load_hf(tmp_path / "turned")[1], params)
    save_hf(tmp_path / "jax", CONFIG, {"params": unflatten({n: jnp.asarray(v) for n, v in flatten(params).items()})})
    same(load_hf(tmp_path / "jax")[1], params)


def test_shards(folder, params):
    shard(folder)
    config, loaded = load_hf(folder)
    assert config == CONFIG
    same(loaded, params)


@pytest.mark.parametrize("which", [("gate_up", "down"), ("gate_up",), ("down",)])
def test_fused_experts(folder, params, which):
    tensors = read(folder)
    for layer in range(2):  # the last layer stays expert by expert
        for name in which:
            parts = ("gate_proj", "up_proj") if name == "gate_up" else ("down_proj",)
            for expert in range(4):
                for part in parts:
                    del tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"]
            tensors[f"model.layers.{layer}.mlp.experts.{name}_proj"] = params["layers"]["experts"][name][layer]
    write(folder, tensors)
    same(load_hf(folder)[1], params)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_floats_are_rounded_with_a_note(folder, dtype):
    exact = {name: np.random.default_rng(1).normal(0, 0.1, v.shape).astype(dtype) for name, v in read(folder).items()}
    write(folder, exact)
    with pytest.warns(UserWarning, match=f"copy holds {dtype} tensors; they are rounded to bfloat16"):
        _, loaded = load_hf(folder)
    wanted = exact["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    assert np.array_equal(loaded["embed"]["embedding"], wanted)
    notes = []
    load_hf(folder, notes.append)
    assert len(notes) == 1


def test_layers_on_demand(tmp_path, folder, params):
    checkpoint = HFCheckpoint(folder)
    source = checkpoint.source()
    layer = source.layer(2)
    same(layer, {name: value[2] for name, value in flatten(params).items() if name.startswith("layers/")})
    same(source.outer(), {name: value for name, value in flatten(params).items() if not name.startswith("layers/")})
    lazy = source.tree()
    stack = lazy["layers"]["experts"]["down"]
    assert isinstance(stack, LayerStack) and stack.shape == (3, 4, 16, 6) and stack.ndim == 4 and len(stack) == 3
    assert stack.nbytes == params["layers"]["experts"]["down"].nbytes
    assert [part.shape for part in stack] == [(4, 16, 6)] * 3
    same(lazy, params)
    with pytest.raises(IndexError):
        stack[3]
    save_hf(tmp_path / "streamed", CONFIG, lazy)
    assert (tmp_path / "streamed" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_quantizing_a_checkpoint_on_disk_holds_one_layer(tmp_path, folder, params, monkeypatch):
    def forbidden(_self, dtype=None, copy=None):
        raise AssertionError("the whole stack was read")

    wanted = quantize(params, CONFIG, tmp_path / "whole", bits="2-3")
    monkeypatch.setattr(LayerStack, "__array__", forbidden)
    made = quantize(HFCheckpoint(folder).source().tree(), CONFIG, tmp_path / "streamed", bits="2-3")
    assert (made / "manifest.json").read_bytes() == (wanted / "manifest.json").read_bytes()


@pytest.mark.slow
def test_calibrating_a_checkpoint_on_disk(tmp_path, folder, params):
    tokens = np.random.default_rng(0).integers(0, 30, (2, 12))
    wanted = quantize(params, CONFIG, tmp_path / "whole", text=tokens, bits="2-3")
    made = quantize(HFCheckpoint(folder).source().tree(), CONFIG, tmp_path / "streamed", text=tokens, bits="2-3")
    assert (made / "manifest.json").read_bytes() == (wanted / "manifest.json").read_bytes()


def test_ignored_tensors(folder, params):
    tensors = read(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write(folder, tensors)
    same(load_hf(folder, print)[1], params)


def test_tied_head_that_is_stored(folder):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding"):
        load_hf(folder)
    tensors = read(folder)
    write(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "lm_head" not in load_hf(folder)[1]


def test_bad_tensors_are_all_named(folder):
    tensors = read(folder)
    for expert in (0, 1, 3):
        del tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.7.input_layernorm.weight"] = np.ones(16, ml_dtypes.bfloat16)
    tensors[GATE] = tensors[GATE].T
    tensors["model.layers.0.mlp.gate.weight"] = np.ones((4, 16), np.int8)
    write(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_hf(folder)
    text = str(caught.value)
    for part in (
        "model.layers.0.mlp.experts.0-1.up_proj.weight is missing",
        "model.layers.0.mlp.experts.3.up_proj.weight is missing",
        "model.norm.weight is missing",
        "model.layers.7.input_layernorm.weight is not part of this model",
        f"{GATE} has the shape [16, 6] instead of [6, 16]",
        "model.layers.0.mlp.gate.weight is stored as I8, not as a float",
    ):
        assert part in text
    assert text.count(";") == 5


def test_missing_and_truncated_shards_are_named_together(folder):
    shard(folder, 4)
    (folder / "model-00001-of-00004.safetensors").unlink()
    cut = folder / "model-00003-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    tensors = load_file(folder / "model-00002-of-00004.safetensors")
    first = sorted(tensors)[0]
    save_file({**tensors, first: np.ones((1, 2, 3), np.float32)}, folder / "model-00002-of-00004.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_hf(folder)
    text = str(caught.value)
    assert "model-00001-of-00004.safetensors is missing" in text
    assert "model-00003-of-00004.safetensors is truncated" in text
    assert f"{first} has the shape [1, 2, 3] instead of" in text
    assert text.count(";") == 2  # what is in the lost shards is not blamed tensor by tensor


def test_a_stale_shard_is_told_and_never_read(folder, params):
    shard(folder, 2)
    stale = {name: np.full_like(value, 9) for name, value in flatten(params).items() if name == "norm/scale"}
    save_file({"model.norm.weight": stale["norm/scale"]}, folder / "model-00003-of-00003.safetensors")
    notes = []
    same(load_hf(folder, notes.append)[1], params)
    assert notes == ["model-00003-of-00003.safetensors is not part of the checkpoint and is not read"]


def test_saved_shards(tmp_path, folder, params):
    save_hf(tmp_path / "shards", CONFIG, params, shard_bytes=3000)
    files = sorted(p.name for p in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    sizes = [sum(v.nbytes for v in load_file(tmp_path / "shards" / file).values()) for file in files]
    assert max(sizes) <= 3000 and sum(sizes) == index["metadata"]["total_size"]
    assert sorted(index["weight_map"]) == sorted(read(folder))
    same(load_hf(tmp_path / "shards")[1], params)


def test_an_activation_that_is_not_known(folder):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "hidden_act": "swiglu_oai"}))
    with pytest.raises(CheckpointError, match="hidden_act = 'swiglu_oai' is not supported; allowed: 'silu'"):
        load_hf(folder)


def test_index_and_shards_that_disagree(folder):
    shard(folder, 2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    moved = sorted(index["weight_map"])[0]
    del index["weight_map"][moved]
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model.extra is not in model-00001-of-00002.safetensors") as caught:
        load_hf(folder)
    assert f"{moved} is in model-00001-of-00002.safetensors, but not in" in str(caught.value)
    file.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of the directory: ../other.safetensors"):
        load_hf(folder)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_hf(folder)


def test_truncated_single_file(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], whole[:100], b"", b"not a checkpoint at all"):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="model.safetensors is truncated or not a safetensors file"):
            load_hf(folder)


def test_directories_that_are_no_checkpoint(tmp_path, folder):
    with pytest.raises(CheckpointError, match="no checkpoint directory at"):
        load_hf(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_hf(empty)
    (empty / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        load_hf(empty)
    (empty / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        load_hf(empty)
    (empty / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="unknown model type 'llama'"):
        load_hf(empty)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="it has pytorch_model.bin: only safetensors"):
        load_hf(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has both"):
        load_hf(folder)


def test_end_tokens_of_generation_config_are_added(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0]}))
    assert load_hf(folder)[0].eos_token_ids == (0, 5)
    # The tokenizer's own, as a string or an object; what lies past the model's vocabulary is no token of it.
    vocab = {"[UNK]": 1, "</s>": 7, "<|im_end|>": 9, "<|far|>": 40}
    Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    for token, wanted in [("</s>", (0, 5, 7)), ({"content": "<|im_end|>"}, (0, 5, 9)), ("<|far|>", (0, 5)),
                          ("none of it", (0, 5)), (None, (0, 5))]:  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert load_hf(folder)[0].eos_token_ids == wanted


def test_save_refuses(tmp_path, params, monkeypatch):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(CheckpointError, match="not an empty directory"):
        save_hf(taken, CONFIG, params)
    broken = flatten(params)
    del broken["norm/scale"]
    broken["layers/experts/down"] = broken["layers/experts/down"].swapaxes(2, 3)
    with pytest.raises(CheckpointError, match="norm/scale is missing; layers/experts/down has the shape"):
        save_hf(tmp_path / "out", CONFIG, unflatten(broken))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        save_hf(tmp_path / "file" / "out", CONFIG, params)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(CheckpointError, match="not enough disk space"):
            save_hf(tmp_path / "out", CONFIG, params)

    def fail(_done, _total):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="the disk is full"):
        save_hf(tmp_path / "out", CONFIG, params, progress=fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    empty = tmp_path / "empty"
    empty.mkdir()
    save_hf(empty, CONFIG, params)  # an empty directory is as good as none


def test_tokenizer_files(tmp_path, params):
    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    out = save_hf(tmp_path / "out", CONFIG, params, tokenizer_file=tmp_path / "tokenizer.json")
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["eos_token"] == "<|endoftext|>"
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 0}
    # What is there already, as in a quantized model, is kept.
    (out / "tokenizer_config.json").write_text("{}")
    again = save_hf(tmp_path / "again", CONFIG, params, tokenizer_file=out)
    assert (again / "tokenizer_config.json").read_text() == "{}"
    vocab = {str(i): i for i in range(31)}
    Tokenizer(models.WordLevel(vocab, unk_token="0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ids up to 30, but the model has only 30 entries"):
        save_hf(tmp_path / "big", CONFIG, params, tokenizer_file=tmp_path / "tokenizer.json")


def test_runs_are_exact():
    names = [f"a.layers.{i}.experts.{e}.w is missing" for i in (0, 1, 3) for e in (0, 1, 2, 5)] + ["b is missing"]
    assert collapse(names) == [
        "a.layers.0-1.experts.0-2.w is missing",
        "a.layers.3.experts.0-2.w is missing",
        "a.layers.0-1.experts.5.w is missing",
        "a.layers.3.experts.5.w is missing",
        "b is missing",
    ]


def golden_cases():
    with np.load(GOLDEN) as file:
        return sorted({name.split("/")[0] for name in file.files})


@pytest.mark.parametrize("case", golden_cases())
def test_golden_logits(tmp_path, case):
    """The numbers of transformers, stored by ``tests/golden/make_qwen2_moe.py``."""
    with np.load(GOLDEN) as file:
        stored = {name.removeprefix(f"{case}/"): file[name] for name in file.files if name.startswith(f"{case}/")}
    (tmp_path / "config.json").write_text(str(stored["config"]))
    weights = {n.removeprefix("weights/"): v for n, v in stored.items() if n.startswith("weights/")}
    write(tmp_path, {n: v.view(ml_dtypes.bfloat16) for n, v in weights.items()})
    config, params = load_hf(tmp_path)
    got = logits(config, params, forward(config, params, stored["tokens"], stored["lengths"]).hidden)
    valid = np.arange(stored["tokens"].shape[1])[None] < stored["lengths"][:, None]
    assert np.abs(stored["logits"]).max() > 1
    assert np.abs(np.asarray(got) - stored["logits"])[valid].max() < 2e-4

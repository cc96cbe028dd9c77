"""The model and its checkpoints against transformers: equal logits, and a saved checkpoint that it reads."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pwjax[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pwjax[hf]'")

import jax.numpy as jnp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from pwjax.checkpoints.hf import load_hf, save_hf  # noqa: E402
from pwjax.models import forward, logits, loss_fn  # noqa: E402

pytestmark = pytest.mark.parity

SPEC = importlib.util.spec_from_file_location(
    "make_qwen2_moe", Path(__file__).parents[1] / "golden" / "make_qwen2_moe.py"
)
golden = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(golden)

TOLERANCE = 2e-4
SWITCHES = {
    "plain": {},
    "renormalized": {"norm_topk_prob": True},
    "tied": {"tie_word_embeddings": True},
    "grouped_heads": {"num_key_value_heads": 1, "norm_topk_prob": True},
    "no_shared_no_bias": {"shared_expert_intermediate_size": 0, "qkv_bias": False, "num_key_value_heads": 2},
    # 2 I < H, the case in which a guessed orientation is wrong and loads all the same; head_dim apart from H / heads.
    "narrow": {
        "hidden_size": 32, "moe_intermediate_size": 4, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 4,
    },
}  # fmt: skip


def ours(config, params, tokens, lengths):
    return np.asarray(logits(config, params, forward(config, params, jnp.asarray(tokens), jnp.asarray(lengths)).hidden))


def worst(left, right, lengths):
    valid = np.arange(left.shape[1])[None] < np.asarray(lengths)[:, None]
    return np.abs(left - right)[valid].max()


def saved(model, path):
    golden.save(model, path)
    return path


@pytest.mark.parametrize("switch", SWITCHES)
def test_logits(tmp_path, switch, record_testsuite_property):
    model = golden.tiny_model(seed=1, **SWITCHES[switch])
    config, params = load_hf(saved(model, tmp_path / "hf"))
    rng = np.random.default_rng(2)
    seen = 0.0
    for lengths in ([1], [2], [63], [300], [17, 5, 1]):
        tokens = rng.integers(0, 40, (len(lengths), max(lengths)), np.int32)
        wanted = golden.logits(model, tokens, np.array(lengths))
        assert np.abs(wanted).max() > 1  # a model that says nothing would agree with everything
        seen = max(seen, worst(ours(config, params, tokens, lengths), wanted, lengths))
    record_testsuite_property(f"worst difference {switch}", float(seen))
    assert seen < TOLERANCE, seen


def test_fused_and_sharded_checkpoints(tmp_path):
    model = golden.tiny_model(seed=3)
    config, params = load_hf(saved(model, tmp_path / "single"))
    model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    # The names under which transformers 5 holds experts in memory.
    fused = tmp_path / "fused"
    fused.mkdir()
    save_file({n: v.contiguous() for n, v in model.state_dict().items()}, fused / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(fused / "model.safetensors"))
    (fused / "config.json").write_bytes((tmp_path / "single" / "config.json").read_bytes())
    tokens = np.arange(20, dtype=np.int32)[None]
    wanted = ours(config, params, tokens, [20])
    for name in ("shards", "fused"):
        again, other = load_hf(tmp_path / name)
        assert again == config
        assert np.array_equal(ours(config, other, tokens, [20]), wanted)


@pytest.mark.parametrize("switch", SWITCHES)
def test_saved_checkpoint_loads_in_transformers(tmp_path, switch, caplog):
    model = golden.tiny_model(seed=4, **SWITCHES[switch])
    config, params = load_hf(saved(model, tmp_path / "theirs"))
    save_hf(tmp_path / "ours", config, params)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    # The head of a tied model is the embedding, and in neither file.
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert set(info["missing_keys"]) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    tokens = np.random.default_rng(5).integers(0, 40, (3, 50), np.int32)
    ids = torch.tensor(tokens, dtype=torch.long)
    with torch.no_grad():
        loss, wanted = float(read(ids, labels=ids).loss), float(model(ids, labels=ids).loss)
    assert loss == pytest.approx(wanted, abs=1e-6)
    assert float(np.mean(loss_fn(config)(params, jnp.asarray(tokens)))) == pytest.approx(loss, abs=2e-5)


def test_saved_tokenizer_loads_in_transformers(tmp_path):
    made = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "[UNK]": 1, "hello": 2, "world": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    config, params = load_hf(saved(golden.tiny_model(), tmp_path / "theirs"))
    save_hf(tmp_path / "ours", config, params, tokenizer_file=tmp_path / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("hello world").input_ids == [2, 3]
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == 512
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == 0
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["eos_token_id"] == 0

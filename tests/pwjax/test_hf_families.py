"""Checkpoints of every family: hub names, other spellings, nested text models, and all tensors accounted for."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pwjax.checkpoints.hf import HFCheckpoint, load_hf, save_hf
from pwjax.checkpoints.tree import flatten, param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError

COMMON = dict(
    vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=1e-6, eos_token_id=0, bos_token_id=1,
)  # fmt: skip
CONFIGS = {
    "qwen2_moe": dict(
        COMMON, model_type="qwen2_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6,
        shared_expert_intermediate_size=10, norm_topk_prob=False, rope_theta=1e6, hidden_act="silu",
    ),
    "mixtral": dict(
        COMMON, model_type="mixtral", num_local_experts=3, num_experts_per_tok=2, intermediate_size=6, rope_theta=1e6,
        hidden_act="silu", sliding_window=None,
    ),
    "gemma4": dict(
        COMMON, model_type="gemma4_text", num_hidden_layers=6, enable_moe_block=True, num_experts=3, top_k_experts=2,
        moe_intermediate_size=6, intermediate_size=10, global_head_dim=12, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=8, final_logit_softcapping=30.0,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
}  # fmt: skip
EXPERT = {
    "qwen2_moe": ("model.layers.1.mlp.experts.2.{}_proj.weight", "gate", "up", "down"),
    "mixtral": ("model.layers.1.block_sparse_moe.experts.2.{}.weight", "w1", "w3", "w2"),
}


@pytest.fixture(params=CONFIGS)
def family(request):
    return request.param


@pytest.fixture
def config(family):
    return ModelConfig.from_hf(CONFIGS[family])


@pytest.fixture
def params(config):
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 1, shape).astype(ml_dtypes.bfloat16) for name, shape in param_shapes(config).items()}


@pytest.fixture
def folder(tmp_path, config, params):
    return save_hf(tmp_path / "hf", config, unflatten(params))


def same(tree, params):
    loaded = flatten(tree)
    assert sorted(loaded) == sorted(params)
    for name, value in params.items():
        assert loaded[name].dtype == ml_dtypes.bfloat16 and loaded[name].tobytes() == value.tobytes(), name


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def write(folder, tensors):
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


def nest(folder):
    """The checkpoint as the hub's multimodal one has it: nested names, towers beside the text model."""
    tower = np.ones((2, 3), ml_dtypes.bfloat16)
    tensors = {re.sub("^model.", "model.language_model.", name): v for name, v in tensors_of(folder).items()}
    towers = ("vision_tower.encoder.layers.0.mlp.up_proj.linear", "embed_vision.embedding_projection", "audio_tower.x")
    write(folder, {**tensors, **{f"model.{name}.weight": tower for name in towers}})
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text, "vision_config": {}}))


def test_round_trip(folder, config, params):
    again, tree = load_hf(folder)
    assert again == config
    same(tree, params)
    source = HFCheckpoint(folder).source()
    last = source.layer(config.num_layers - 1)
    stacked = {name: params[name][-1] for name in last}
    same(last, stacked)
    names = {name for name in params if name.startswith("layers/")}
    other = "layers/attn_sliding/" if config.other_kinds else "nothing"  # the last layer is a full one
    assert set(last) == {name for name in names if not name.startswith(other)}


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["gemma4"], indirect=True)
def test_no_type_of_tensors_changes_the_scale_of_embeddings(tmp_path, family, dtype, stored):
    # The root of 24 is 4.898979, in bfloat16 4.90625.
    config = ModelConfig.from_hf({**CONFIGS[family], "hidden_size": 24, "torch_dtype": stored})
    params = {name: np.ones(shape, np.float32) for name, shape in param_shapes(config).items()}
    again, _ = load_hf(save_hf(tmp_path / "hf", config, unflatten(params), dtype=dtype), print, np.float32)
    assert again == config and again.embed_scale == (4.90625 if stored == "bfloat16" else float(np.float32(24**0.5)))
    assert tensors_of(tmp_path / "hf")["model.norm.weight"].dtype == dtype


def test_names_of_the_hub(folder, family, params):
    tensors = tensors_of(folder)
    gate_up, down = params["layers/experts/gate_up"][1], params["layers/experts/down"][1]
    if family == "gemma4":
        assert tensors["model.layers.1.experts.gate_up_proj"].tobytes() == gate_up.tobytes()
        assert tensors["model.layers.1.experts.down_proj"].tobytes() == down.tobytes()
        # The third layer is the first full one: no values of its own, other sizes.
        assert "model.layers.2.self_attn.v_proj.weight" not in tensors and "lm_head.weight" not in tensors
        full = params["layers/attn_full/q/kernel"]
        assert tensors["model.layers.5.self_attn.q_proj.weight"].tobytes() == full[1].tobytes()
        sliding = params["layers/attn_sliding/v/kernel"]
        assert tensors["model.layers.3.self_attn.v_proj.weight"].tobytes() == sliding[2].tobytes()
        assert tensors["model.layers.0.layer_scalar"].shape == (1,)
        assert tensors["model.layers.0.router.per_expert_scale"].shape == (3,)
    else:
        form, *names = EXPERT[family]
        wanted = (gate_up[2, :6], gate_up[2, 6:], down[2])
        for name, value in zip(names, wanted, strict=True):
            assert tensors[form.format(name)].tobytes() == value.tobytes()


@pytest.mark.parametrize("family", ["mixtral"], indirect=True)
def test_names_of_transformers_5(folder, params):
    tensors = {n: v for n, v in tensors_of(folder).items() if "block_sparse_moe" not in n}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = params["layers/router/kernel"][layer]
        for name in ("gate_up", "down"):
            tensors[f"{prefix}.experts.{name}_proj"] = params[f"layers/experts/{name}"][layer]
    write(folder, tensors)
    same(load_hf(folder)[1], params)


@pytest.mark.parametrize("family", ["gemma4"], indirect=True)
def test_the_text_model_of_a_multimodal_checkpoint(folder, config, params):
    nest(folder)
    notes = []
    again, tree = load_hf(folder, notes.append)
    assert again == config
    same(tree, params)
    assert notes == ["3 tensors of the vision and audio towers are skipped (36 B): only the text model is read"]


def test_towers_belong_to_multimodal_families_only(folder, family):
    write(folder, {**tensors_of(folder), "model.vision_tower.x": np.ones(2, ml_dtypes.bfloat16)})
    if family == "gemma4":
        assert len(HFCheckpoint(folder).notes) == 1
        return
    with pytest.raises(CheckpointError, match="model.vision_tower.x is not part of this model"):
        load_hf(folder)


def test_every_tensor_is_accounted_for(folder):
    tensors = tensors_of(folder)
    for lost in [name for name in tensors if ".layers.0." in name or ".layers." not in name]:
        write(folder, {name: value for name, value in tensors.items() if name != lost})
        with pytest.raises(CheckpointError, match=f"{re.escape(lost)} is missing"):
            HFCheckpoint(folder)
    name = "model.layers.1.input_layernorm.weight"
    write(folder, {**tensors, name: tensors[name][:-1], "model.layers.0.self_attn.sinks": tensors[name]})
    with pytest.raises(CheckpointError, match=f"{name} has the shape .15. instead of .16.") as caught:
        HFCheckpoint(folder)
    assert "model.layers.0.self_attn.sinks is not part of this model" in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_wide_floats_are_rounded_to_nearest(folder, params, dtype):
    wide = {name: (value.astype("float64") * 1.0009).astype(dtype) for name, value in tensors_of(folder).items()}
    write(folder, wide)
    tree = flatten(load_hf(folder, print)[1])
    wanted = {name: (value.astype("float64") * 1.0009).astype(dtype) for name, value in params.items()}
    same(tree, {name: value.astype(ml_dtypes.bfloat16) for name, value in wanted.items()})


def test_unknown_activations(folder, family):
    file = Path(folder) / "config.json"
    key = "hidden_activation" if family == "gemma4" else "hidden_act"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: "relu2"}))
    with pytest.raises(CheckpointError, match=f"{key} = 'relu2' is not supported"):
        load_hf(folder)

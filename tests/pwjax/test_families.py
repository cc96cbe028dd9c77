"""The model families without torch: stored logits of transformers, configurations, the scan over kinds of layers."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pwjax
from pwjax import models
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import load_hf
from pwjax.config import AttentionKind, ModelConfig
from pwjax.errors import CheckpointError
from pwjax.models.scan import scan_layers, segments
from pwjax.quantization import quantize

GOLDEN = Path(__file__).parents[1] / "golden"
# Few in the default tier, for each compiles a program; the multimodal checkpoint shares that of the plain one.
CASES = [
    pytest.param("mixtral", "plain", marks=pytest.mark.slow),
    ("mixtral", "windowed_tied"),
    ("gemma4", "plain"),
    ("gemma4", "multimodal"),
    pytest.param("gemma4", "own_values_rest", marks=pytest.mark.slow),
]
WINDOWED = [("mixtral", "windowed_tied"), ("gemma4", "plain")]


def stored(family, case, folder):
    """Write the checkpoint of a case of ``tests/golden/make_families.py``; returns its arrays."""
    with np.load(GOLDEN / f"{family}.npz") as file:
        arrays = {name.removeprefix(f"{case}/"): file[name] for name in file.files if name.startswith(f"{case}/")}
    (folder / "model.safetensors").write_bytes(arrays["checkpoint"].tobytes())
    (folder / "config.json").write_text(str(arrays["config"]))
    return arrays


def float32(params):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)


def head(config):
    return jax.jit(
        lambda params, tokens, lengths=None, paged=None: models.logits(
            config, params, models.forward(config, params, tokens, lengths, paged).hidden
        )
    )


@pytest.mark.parametrize(("family", "case"), CASES)
def test_golden_logits(tmp_path, family, case):
    arrays = stored(family, case, tmp_path)
    config, params = load_hf(tmp_path)
    got = head(config)(float32(params), arrays["tokens"], arrays["lengths"])
    valid = np.arange(24) < arrays["lengths"][:, None]
    assert np.abs(arrays["logits"]).max() > 1
    assert np.abs(np.asarray(got) - arrays["logits"])[valid].max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), WINDOWED)
def test_the_paged_form_equals_the_dense_one(tmp_path, family, case):
    arrays = stored(family, case, tmp_path)
    config, params = load_hf(tmp_path)
    artifact = Artifact.open(quantize(params, config, tmp_path / "m.pw", lut_rows=8, page_words=128))
    resident = pwjax.Resident.load(artifact)
    run = head(config)
    for bits in (16, 3):
        dense = float32(artifact.dense_params())
        dense = {**dense, "layers": {**dense["layers"], "experts": artifact.expert_params(bits)}}
        table = resident.table(bits)
        paged = models.Paged(resident.arena, table.bits, table.pages, artifact.geometry)
        want, got = run(dense, arrays["tokens"]), run(resident.params, arrays["tokens"], None, paged)
        np.testing.assert_allclose(got, want, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), WINDOWED)
def test_the_engine_continues_as_the_dense_form_does(exact_activations, tmp_path, family, case):
    """Past the window, in chunks that are no divisor of it, while bits move with the KV cache or stay."""
    stored(family, case, tmp_path)
    config, params = load_hf(tmp_path)
    out = quantize(params, config, tmp_path / "m.pw", lut_rows=8, page_words=128)
    prompts = [tuple(range(1, 31)), (5, 6, 7)]
    run, texts = head(config), []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(20):
            padded = np.zeros((1, 64), np.int32)
            padded[0, : len(tokens)] = tokens
            tokens.append(int(run(float32(params), padded)[0, len(tokens) - 1].argmax()))
        texts.append(tokens[len(prompt) :])
    sampling = pwjax.SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [pwjax.Request(i, prompt_token_ids=p, sampling=sampling) for i, p in enumerate(prompts)]
    with pwjax.load(out, batch=2, context=64, kv_dtype="float32", bits=16, chunks=(7,)) as engine:
        assert [list(c.token_ids) for c in engine.generate(requests)] == texts
        assert engine.parts.kv.used_pages == 0
        sliding = engine.parts.kv.kinds[0]
        assert sliding.columns < -(-64 // sliding.page_tokens)
        engine.parts.kv.check_invariants()


# Configurations

GEMMA = {
    "model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 16, "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8, "hidden_size_per_layer_input": 0,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "dtype": "bfloat16",
}  # fmt: skip


def test_gemma_config():
    config = ModelConfig.from_hf(GEMMA)
    assert config.pattern == (0, 0, 0, 0, 0, 1) and config.kind_layers[1] == (5, 11)
    sliding, full = config.attention_kinds
    assert sliding == AttentionKind(name="sliding", head_dim=8, kv_heads=2, rope_theta=1e4, window=16)
    assert full == AttentionKind(
        name="full", head_dim=16, kv_heads=1, rope_theta=1e6, rope_fraction=0.25, k_eq_v=True
    )  # fmt: skip
    assert config.kv_row_words(2) == 8 and config.softcap == 30 and config.query_scale == 1
    # bfloat16 weights see the rounded scale, as transformers multiplies in the type of the weights.
    assert config.embed_scale == 4.90625
    assert ModelConfig.from_hf({**GEMMA, "dtype": "float32"}).embed_scale == float(np.float32(24**0.5))
    for one in (config, ModelConfig.from_hf({**GEMMA, "dtype": "float32"})):
        assert ModelConfig.from_hf(one.to_hf()) == one
        assert ModelConfig.from_json(json.loads(json.dumps(one.to_json()))) == one
    # The overrides a layer of transformers 5, and the multimodal wrapper, say the same.
    layers = {str(n): {"head_dim": 16, "num_key_value_heads": 1} for n in (5, 11)}
    plain = {k: v for k, v in GEMMA.items() if "global" not in k}
    assert ModelConfig.from_hf({**plain, "per_layer_config": layers}) == config
    wrapper = {"model_type": "gemma4", "text_config": GEMMA, "vision_config": {"x": 1}, "image_token_id": 7}
    assert ModelConfig.from_hf(wrapper) == config
    assert ModelConfig.from_hf({**wrapper, "eos_token_id": [1, 9]}).eos_token_ids == (1, 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported"),
        ({"attention_logit_cap": 5.0}, "does not understand: attention_logit_cap"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"enable_moe_block": False}, "has no experts"),
        ({"layer_types": ["chunked_attention"] * 12}, "layer_types must be 12 entries"),
        ({"per_layer_config": {"3": {"head_dim": 16}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}}, "rope_type 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0}}},
            "factor of the positions",
        ),
        ({"sliding_window": 0}, "window=0"),
    ],
)
def test_what_would_change_the_numbers_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_hf({**GEMMA, **changes})


def test_mixtral_always_renormalizes():
    data = {
        "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 128, "tie_word_embeddings": False,
        "hidden_act": "silu", "sliding_window": None, "head_dim": None,
    }  # fmt: skip
    config = ModelConfig.from_hf(data)
    assert config.norm_topk_prob and config.head_dim == 8 and config.window is None and not config.qkv_bias
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf({**data, "sliding_window": 16}).attention_kinds[0].window == 16
    with pytest.raises(CheckpointError, match="rope_type 'llama3'"):
        ModelConfig.from_hf({**data, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}})


# The scan


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=14))
def test_segments_spell_out_the_layers(kinds):
    spelled = [k for s in segments(tuple(kinds)) for _ in range(s.repeats) for k, n in s.runs for _ in range(n)]
    assert spelled == kinds


def test_a_pattern_is_compiled_once():
    gemma = (0, 0, 0, 0, 0, 1)
    assert segments(gemma * 5) == ((5, ((0, 5), (1, 1))),)
    assert segments((0,) * 24) == ((1, ((0, 24),)),) or segments((0,) * 24) == ((24, ((0, 1),)),)
    assert sum(len(s.runs) for s in segments(gemma * 5 + (0, 1))) == 4


@pytest.mark.parametrize("kinds", [(0, 0, 1) * 3, (0, 1, 0, 1, 1), (0, 0, 0), (0, 0, 1, 0, 0, 1, 0)])
def test_layers_run_in_order_with_their_own_parameters(kinds):
    counts = [kinds.count(k) for k in range(max(kinds) + 1)]
    shared, own = np.arange(1.0, len(kinds) + 1), tuple(np.arange(n) * 10.0 + k for k, n in enumerate(counts))

    def body(kind, carry, item):
        mixed = carry * 3 % 97 + item[0] + item[1]
        return mixed, (mixed, mixed + kind)

    carry, out, own_out = jax.jit(lambda c: scan_layers(kinds, body, c, shared, own))(jnp.float32(5))
    want, at = 5.0, [0] * len(counts)
    for layer, kind in enumerate(kinds):
        want = want * 3 % 97 + shared[layer] + own[kind][at[kind]]
        assert out[layer] == want and own_out[kind][at[kind]] == want + kind
        at[kind] += 1
    assert carry == want


def test_programs_do_not_grow_with_the_depth():
    def size(layers):
        config = ModelConfig.from_hf({**GEMMA, "num_hidden_layers": layers})
        params = jax.eval_shape(lambda: models.init_params(config))
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        return str(jax.make_jaxpr(lambda p, t: models.forward(config, p, t).hidden)(params, tokens)).count(" = ")

    assert size(60) == size(12)

"""A model with windows in the engine: rings of KV pages while bits move, preemption, and prompts up to the limit."""

import json

import ml_dtypes
import numpy as np
import pytest

import pwjax
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.tree import param_shapes, unflatten
from pwjax.cli import main
from pwjax.config import ModelConfig
from pwjax.engine.sequence import Completion
from pwjax.loading import load, outlook
from pwjax.quantization import quantize

# One size of program for prompts, which no prompt below is a multiple of.
SHAPES = {"batch": 3, "context": 512, "chunks": (16,)}
LENGTHS = ((505, 7), (3, 90), (301, 40), (120, 60), (200, 100))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Artifact of a random Gemma 4: sliding and full layers in turn, a window of 16 of at most 512 tokens."""
    config = ModelConfig.from_hf({
        "model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 12,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 16,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 2, "dtype": "bfloat16",
    })  # fmt: skip
    rng = np.random.default_rng(0)
    draw = {name: rng.standard_t(5, shape) * 0.15 for name, shape in param_shapes(config).items()}
    draw |= {name: 1 + 0.1 * value for name, value in draw.items() if name.endswith(("scale", "scalar"))}
    params = unflatten({name: value.astype(ml_dtypes.bfloat16) for name, value in draw.items()})
    return quantize(params, config, tmp_path_factory.mktemp("gemma") / "m.pw", lut_rows=32, page_words=64)


def requests():
    rng, out = np.random.default_rng(1), []
    for i, (prompt, new) in enumerate(LENGTHS):
        sampling = pwjax.SamplingParams(max_tokens=new, ignore_eos=True)
        out.append(pwjax.Request(i, None, tuple(rng.integers(1, 64, prompt).tolist()), sampling))
    return out


@pytest.mark.slow
def test_rings_under_moving_bits_and_pressure(gemma, budget_for, tmp_path, capsys):
    memory = outlook(Artifact.open(gemma), **SHAPES).memory
    # The lowest weights and little more than the longest sequence: bits must fall, then slots take turns.
    pages = 1 + memory.weights_min_pages + memory.sequence_pages * 9 // 8
    budget, log = budget_for(gemma, pages, **SHAPES), tmp_path / "log.jsonl"

    with load(gemma, budget, **SHAPES, log=log) as engine:
        kv, pager = engine.parts.kv, engine.parts.pager
        sliding, full = kv.kinds
        assert sliding.columns == 3 and full.columns == 64
        for request in requests():
            engine.submit(request)
        done = []
        while not engine.idle:
            done += [event for event in engine.step() if isinstance(event, Completion)]
            kv.check_invariants()
            pager.check_invariants()
        assert sorted((c.id, c.generated_tokens) for c in done) == [(i, m) for i, (_, m) in enumerate(LENGTHS)]
        stats = engine.stats()
        assert stats["precision"]["demotions"] > 0
        assert stats["scheduler"]["preemptions"] > 0
        assert stats["compile"]["recompiles_after_warmup"] == 0
        assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
        assert kv.used_pages == 0

    assert json.loads(log.read_text().splitlines()[0])["settings"]["chunks"] == [16]
    assert main(["replay", str(log), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]

    # Frozen under way, where blocks differ in bits.
    with load(gemma, budget, **SHAPES) as engine:
        for request in requests():
            engine.submit(request)
        while engine.stats()["precision"]["demotions"] < 4 and not engine.idle:
            engine.step()
        engine.cancel()
        bits = engine.freeze()
        assert len(set(bits.tolist())) > 1
        # The longest does not fit beside the bits that are frozen here.
        moved = [c.token_ids for c in engine.generate(requests()[1:])]

    with load(gemma, budget, **SHAPES, bits=bits) as engine:
        assert [c.token_ids for c in engine.generate(requests()[1:])] == moved

"""The three families against transformers: logits, gradients, and the text that the engine continues a prompt with.

pytest -m parity tests/parity/test_families.py
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pwjax[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pwjax[hf]'")

import families  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pwjax import Request, SamplingParams, load, quantize  # noqa: E402
from pwjax.checkpoints.hf import load_hf  # noqa: E402
from pwjax.checkpoints.hf_names import Names  # noqa: E402
from pwjax.checkpoints.tree import flatten, param_shapes  # noqa: E402
from pwjax.engine.budget import ProgramSizes  # noqa: E402
from pwjax.models import Fresh, apply, logits, loss_fn  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 2e-4
# Median difference of logits of size 4 where keys and values are rounded to bfloat16. The worst is no measure: now and
# then the rounding makes a router choose another expert.
BFLOAT16_TOLERANCE = 0.05
LENGTHS = np.array([300, 1, 2, 63, 64, 65])
TOKENS = np.random.default_rng(0).integers(0, families.VOCAB, (6, 300)).astype(np.int32)

CASES = {
    "qwen2_moe": {},
    "qwen2_moe renormalized tied gqa4": {
        "norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
    },
    "qwen2_moe gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4, "qkv_bias": False},
    "mixtral": {},
    "mixtral windowed gqa8": {"sliding_window": 20, "num_attention_heads": 8, "num_key_value_heads": 1},
    "mixtral tied gqa1": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "gemma4": {},
    # Five sliding layers, a full one, and a rest that is no whole period; values of full layers of their own.
    "gemma4 deep": {"layer_types": None, "num_hidden_layers": 8, "attention_k_eq_v": False},
    "gemma4 gqa8 untied uncapped": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "final_logit_softcapping": None,
    },
}  # fmt: skip


def float32(params):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)


def ours(config, params, dtype="float32"):
    """Logits of :data:`TOKENS`, keys and values in ``dtype``."""

    def run(params, tokens, lengths):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        fresh = Fresh.empty(config, *tokens.shape, dtype)
        out = apply(config, params, tokens, positions, positions < lengths[:, None], fresh)
        return logits(config, params, out.hidden)

    return np.asarray(jax.jit(run)(params, TOKENS, LENGTHS))


def worst(left, right):
    return np.abs(left - right)[np.arange(300) < LENGTHS[:, None]].max()


@pytest.mark.parametrize("case", CASES)
def test_logits_of_ragged_batches(saved_family, case, record_testsuite_property):
    model, folder = saved_family(case.split()[0], seed=1, **CASES[case])
    config, params = load_hf(folder)
    want = families.logits(model, TOKENS, LENGTHS)
    assert np.abs(want).max() > 1  # a model that says nothing would agree with everything
    seen = worst(ours(config, float32(params)), want)
    record_testsuite_property(f"worst difference {case}", float(seen))
    print(f"{case}: {seen:.1e} of {np.abs(want).max():.1f}")
    assert seen < TOLERANCE


@pytest.mark.parametrize("family", families.FAMILIES)
def test_keys_and_values_in_bfloat16_stay_close(saved_family, family):
    model, folder = saved_family(family, seed=1)
    config, params = load_hf(folder)
    apart = np.abs(ours(config, float32(params), "bfloat16") - families.logits(model, TOKENS, LENGTHS))
    seen = np.median(apart[np.arange(300) < LENGTHS[:, None]])
    print(f"{family}: {seen:.1e}")
    assert 1e-5 < seen < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("family", families.FAMILIES)
def test_router_ties(tmp_path, family):
    """Two experts that are alike tie for every token; which of them is taken must not show."""
    model = families.build(family, seed=2)
    with torch.no_grad():
        for layer in model.model.layers:
            router, experts = (
                (layer.router.proj, layer.experts) if family == "gemma4" else (layer.mlp.gate, layer.mlp.experts)
            )
            alike = [router.weight, experts.gate_up_proj, experts.down_proj]
            if family == "gemma4":
                alike.append(layer.router.per_expert_scale)
            for weight in alike:
                weight[3] = weight[1]
    config, params = load_hf(families.save(model, tmp_path / "hf"))
    assert worst(ours(config, float32(params)), families.logits(model, TOKENS, LENGTHS)) < TOLERANCE


@pytest.mark.parametrize("family", families.FAMILIES)
def test_gradients_of_the_dense_form(saved_family, family):
    model, folder = saved_family(family, seed=3)
    config, params = load_hf(folder)
    tokens = TOKENS[:1, :48]
    model.zero_grad()
    ids = torch.tensor(tokens, dtype=torch.long)
    scores = torch.log_softmax(model(ids, use_cache=False).logits[:, :-1].double(), -1)
    (-scores.gather(-1, ids[:, 1:, None]).mean()).backward()
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    grads = flatten(jax.jit(jax.grad(lambda p: loss_fn(config)(p, tokens).mean()))(float32(params)))
    want: dict[str, np.ndarray] = {name: np.zeros(shape) for name, shape in param_shapes(config).items()}
    missing = set()
    index = {name: iter(range(10**6)) for name in want}
    for name, layer, parts in Names(config, list(model.state_dict())).all_parts():
        into = want[name] if layer is None else want[name][next(index[name])]
        for part in parts:
            if part.name in theirs:
                into[part.index] = theirs[part.name]
            else:
                missing.add(name)
    # A buffer of theirs, a parameter of ours.
    assert missing <= {"layers/layer_scalar"}
    for name in want.keys() - missing:
        scale = np.abs(want[name]).max()
        assert scale > 0 and np.abs(grads[name] - want[name]).max() < 1e-3 * scale, name


PROMPTS = [TOKENS[0, :n].tolist() for n in (130, 3, 20, 64)]


@pytest.fixture(scope="module")
def continued(saved_family, tmp_path_factory):
    """``(artifact, 64 greedy tokens of every prompt by transformers)`` of a family, made once."""
    made = {}

    def get(family):
        if family not in made:
            model, folder = saved_family(family, seed=4)
            config, params = load_hf(folder)
            out = tmp_path_factory.mktemp(family) / "model.pw"
            quantize(params, config, out, lut_rows=16, page_words=128)
            model.generation_config.eos_token_id = None
            texts = []
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                # Without a mask, generate would make one from the padding id, which prompts may hold.
                mask = torch.ones_like(ids)
                done = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=64, pad_token_id=1)
                texts.append(done[0, len(prompt) :].tolist())
                assert len(texts[-1]) == 64
            made[family] = out, texts
        return made[family]

    return get


# Each size is a program to compile; the one that cuts every prompt unevenly stands for the others in the default tier.
SLOW = pytest.mark.slow
CHUNKS = [7, pytest.param(1, marks=SLOW), pytest.param(64, marks=SLOW), pytest.param("full", marks=SLOW)]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_greedy_text_of_the_engine(continued, monkeypatch, family, chunk):
    """In a ragged batch and alone; programs of decoding are the same for all chunks, so they are compiled once."""
    # Measuring compiles every program a second time; without a budget its result changes nothing.
    monkeypatch.setattr("pwjax.loading.remembered_sizes", lambda shapes, measure: ProgramSizes(1 << 24, 1 << 24))
    artifact, texts = continued(family)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    requests = [Request(i, prompt_token_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(PROMPTS)]
    chunks = (max(map(len, PROMPTS)) if chunk == "full" else chunk,)
    with load(artifact, batch=4, context=256, kv_dtype="float32", bits=16, chunks=chunks) as engine:
        assert engine.parts.shapes.chunks == chunks
        assert [list(c.token_ids) for c in engine.generate(requests)] == texts
        assert [list(engine.generate([request])[0].token_ids) for request in requests] == texts

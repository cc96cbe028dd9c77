"""Perplexity: which tokens count, how it is measured, and that it equals the dense model within the budget."""

import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import pwjax.cli as cli
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.text import Tokenizer
from pwjax.errors import ArtifactError, BudgetError, PWJaxError, UsageError
from pwjax.evaluate import Document, Perplexity, Scorer, heldout_documents, measure_perplexity, read_documents
from pwjax.evaluate.texts import HELDOUT_MODULES
from pwjax.evaluate.windows import Tokens, cut, leading_bos, tokenize
from pwjax.models import next_token_nll
from pwjax.quantization import quantize

TEXT = "def add(x, y):\n    return x + y\n\nnaïve café ☃, 12 + 30 = 42. The quick brown fox.\n" * 6
SHAPE = {"window": 32, "batch": 2}


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return Tokenizer.load(tiny_tokenizer)


def dense_nll(artifact, bits, windows):
    """Sums of the scored tokens of each window, from the dense form with dequantized weights."""
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), artifact.dense_params())
    params["layers"]["experts"] = artifact.expert_params(bits)
    tokens = np.zeros((len(windows), SHAPE["window"]), np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window.tokens)] = window.tokens
    nll, _ = jax.jit(lambda p, t: next_token_nll(artifact.config, p, t))(params, tokens)
    return [float(nll[i, w.first - 1 : len(w.tokens) - 1].sum()) for i, w in enumerate(windows)]


# Windows


@given(st.integers(0, 60), st.integers(2, 12), st.data(), st.booleans())
def test_windows_score_every_token_once(count, window, data, with_bos):
    bos = 99 if with_bos else None
    room = window - with_bos
    stride = data.draw(st.integers(1, room))
    ends = np.cumsum(np.arange(count) % 3)
    made = list(cut(Tokens(np.arange(count, dtype=np.int32), ends), window, stride, bos))
    scored = []
    for w in made:
        assert 1 <= w.first < len(w.tokens) <= window
        assert not with_bos or w.tokens[0] == bos
        own = w.tokens[with_bos:]
        assert np.array_equal(own, np.arange(own[0], own[0] + len(own)))  # in order, without a gap
        scored += w.tokens[w.first :].tolist()
        assert w.bytes == sum(i % 3 for i in w.tokens[w.first :].tolist())
    # Without BOS nothing comes before the first token of a text, or of a window that overlaps no other.
    alone = set() if with_bos else {0} if stride < window else set(range(0, count, window))
    assert scored == [i for i in range(count) if i not in alone]
    if stride < room:
        assert all(w.first >= room - stride for w in made[1:])


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "  naïve ☃☃ \N{GRINNING FACE} x\r\n"
    tokens = tokenize(Document("t", text), tokenizer, 300)
    assert tokens.ends[-1] == len(text.encode()) and (np.diff(tokens.ends, prepend=0) >= 0).all()
    plain = tokenize(Document("t", "abc"), tokenizer, 300)
    assert plain.ends.tolist() == [1, 2, 3][-len(plain.ids) :]
    assert tokenize(Document("t", ""), tokenizer, 300).ids.size == 0
    with pytest.raises(UsageError, match="the model's vocabulary ends at 9"):
        tokenize(Document("t", text), tokenizer, 10)


# The estimate


def test_standard_error_treats_windows_as_samples():
    rng = np.random.default_rng(0)
    means = rng.normal(2, 0.3, 200)
    result = Perplexity(means * 50, np.full(200, 50), np.full(200, 100), np.zeros(200), {})
    assert result.perplexity == pytest.approx(math.exp(means.mean()))
    assert result.stderr == pytest.approx(result.perplexity * means.std(ddof=1) / math.sqrt(200))
    assert result.bits_per_byte == pytest.approx(means.sum() * 50 / math.log(2) / 20_000)
    assert Perplexity(np.array([5.0]), np.array([3]), np.array([9]), np.zeros(1), {}).stderr is None


# The model


@pytest.mark.parametrize("bits", [16, 3])
def test_equals_the_dense_model(exact_activations, tiny_artifact, tokenizer, bits):
    artifact = Artifact.open(tiny_artifact)
    windows = list(cut(tokenize(Document("t", TEXT), tokenizer, 300), 32, 20))
    assert len(windows[-1].tokens) < 32  # the ragged one too
    result = measure_perplexity(artifact, [Document("t", TEXT)], bits=bits, stride=20, **SHAPE)
    assert np.allclose(result.window_nll, dense_nll(artifact, bits, windows), rtol=1e-4)
    assert result.bytes == len(TEXT.encode()) - len("de")  # nothing comes before the first token
    facts = result.to_json()
    assert facts["bits"] == facts["mean_bits"] == bits and facts["bos"] == "none" and facts["stride"] == 20
    assert facts["memory"]["peak_bytes"] <= facts["memory"]["budget_bytes"]
    assert facts["memory"]["peak_bytes"] > facts["memory"]["dense_bytes"] + facts["memory"]["arena_bytes"]
    json.dumps(facts)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(
    tiny_params, tiny_config, tiny_tokenizer, tmp_path
):
    blank = {**tiny_params, "lm_head": {"kernel": np.zeros_like(tiny_params["lm_head"]["kernel"])}}
    out = quantize(blank, tiny_config, tmp_path / "o.pw", tokenizer=tiny_tokenizer, lut_rows=32, page_words=64)
    result = measure_perplexity(out, [Document("t", TEXT)], bits=4, **SHAPE)
    assert result.perplexity == pytest.approx(300, rel=1e-5) and result.stderr < 1e-3
    assert result.bits_per_byte == pytest.approx(math.log2(300) * result.tokens / result.bytes, rel=1e-5)


def test_budget_is_kept_and_the_smallest_is_exact(tiny_artifact):
    with pytest.raises(BudgetError, match="raise --memory-budget or lower --window") as caught:
        Scorer.load(tiny_artifact, 1000, **SHAPE)
    smallest = caught.value.smallest_budget_bytes
    with pytest.raises(BudgetError, match=f"needs {smallest} bytes"):
        Scorer.load(tiny_artifact, smallest - 1, **SHAPE)
    window = np.arange(20) + 5
    with Scorer.load(tiny_artifact, smallest, **SHAPE) as scorer:
        assert scorer.shapes.batch == 1 and set(scorer.plan.bits) == {2}
        assert [one.nll.shape for one in scorer.score([window, window[:2]])] == [(19,), (1,)]
        assert scorer.peak_bytes <= smallest
    with Scorer.load(tiny_artifact, smallest + 60 * 256, **SHAPE) as scorer:  # 60 pages more: mixed bits
        assert scorer.plan.pages_after <= 108 and len(set(scorer.plan.bits)) > 1 and scorer.memory.fits
        list(scorer.score([window]))
        assert scorer.peak_bytes <= scorer.memory.budget_bytes
        assert scorer.memory.total_bytes <= scorer.memory.budget_bytes
    with Scorer.load(tiny_artifact, smallest + 60 * 256, policy="uniform", **SHAPE) as scorer:
        assert set(scorer.plan.bits) == {5}
    with pytest.raises(BudgetError, match="too small"):
        Scorer.load(tiny_artifact, smallest, bits=6, **SHAPE)


def test_bos_is_used_where_the_tokenizer_adds_it(tiny_artifact, tokenizer):
    assert leading_bos(tokenizer) is None
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    assert leading_bos(Tokenizer(backend, 0)) == 0
    assert leading_bos(Tokenizer(backend, None)) is None


# Texts and the command line


def test_heldout_modules():
    found = heldout_documents()
    assert [d.name for d in found] == list(HELDOUT_MODULES)
    assert sum(len(d.text) for d in found) > 100_000
    assert sum(len(d.text.encode()) for d in heldout_documents(60_000)) == 60_000


def test_read_documents(tmp_path, monkeypatch):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_bytes("é☃".encode())
    b.write_bytes(b"bcd")
    assert read_documents([str(a), str(b)], 7) == [(str(a), "é☃"), (str(b), "bc")]
    assert read_documents([str(a), str(b)], 4) == [(str(a), "é")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert read_documents(["-"]) == [("-", "piped")]
    for data, words in [(b" \n", "holds no text"), (b"ok\xff", "is not UTF-8 text: invalid start byte at byte 2")]:
        a.write_bytes(data)
        with pytest.raises(UsageError, match=words):
            read_documents([str(a)])
    with pytest.raises(UsageError, match="cannot read the text .*: No such file"):
        read_documents([str(tmp_path / "c.txt")])


def run(capsys, *argv):
    code = cli.main(["ppl", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(capsys, tiny_artifact, tmp_path):
    base = ("--model", tiny_artifact, "--window", 32, "--batch", 2, "--quiet")
    path = tmp_path / "t.txt"
    path.write_text(TEXT, encoding="utf-8")
    code, out, err = run(capsys, *base, "--text", path, "--bits", 16, "--json")
    facts = json.loads(out)
    assert code == 0 and err == ""
    assert {"perplexity", "stderr", "bits_per_byte", "tokens", "bytes", "bits", "mean_bits", "memory", "window",
            "stride", "bos", "windows", "text"} <= set(facts)  # fmt: skip
    assert facts["text"] == [str(path)] and facts["bits"] == 16 and facts["stride"] == facts["window"] == 32
    budget = facts["memory"]["budget_bytes"] - 90 * 256
    code, out, _ = run(capsys, *base, "--max-tokens", 100, "--memory-budget", budget, "--json")
    mixed = json.loads(out)
    assert code == 0 and mixed["bits"] is None and 2 < mixed["mean_bits"] < 16 and mixed["tokens"] == 96 * 7
    assert mixed["text_source"].startswith("standard library of Python 3")
    assert mixed["text"][0] == "statistics.py" and [t["tokens"] for t in mixed["texts"]] == [96] * 7
    code, out, _ = run(capsys, *base, "--max-bytes", 90, "--bits", 16)
    assert code == 0 and "perplexity" in out and "held out from the bundled model: statistics.py" in out
    assert str(Path.home()) not in out
    assert "left out" not in out and facts["left_out"] == []
    short = tmp_path / "short.txt"
    short.write_text("x", encoding="utf-8")
    code, out, _ = run(capsys, *base, "--text", path, "--text", short, "--bits", 16)
    assert code == 0 and f"left out       {short}: under two tokens" in out


def test_command_under_pressure_and_against_another_run(
    capsys, tiny_artifact, tmp_path, budget_for, quick_programs
):
    budget = budget_for(tiny_artifact, 200, batch=3, context=32, chunks=(32,))
    base = ("--model", tiny_artifact, "--window", 32, "--max-tokens", 64, "--quiet", "--kv-trace", 3)
    run_file = tmp_path / "run.npz"
    argv = (*base, "--memory-budget", budget, "--policy", "default", "--vs", 16, "--save", run_file, "--json")
    code, out, err = run(capsys, *argv)
    facts = json.loads(out)
    assert code == 0 and err == "" and run_file.exists()
    assert facts["kv_trace"]["sequences"] == 3 and facts["policy"] == "default" and facts["kv_dtype"] == "bfloat16"
    assert facts["memory"]["peak_bytes"] <= budget and len(facts["window_nll"]) == facts["windows"] == 14
    assert facts["vs"]["reference"] == "16" and facts["vs"]["kl"] > 0 and facts["vs"]["nll"]["interval_95"]
    code, out, _ = run(capsys, *base, "--memory-budget", budget, "--policy", "default", "--vs", run_file)
    assert code == 0 and "KL 0.000000 ± 0.000000 nats a token" in out and "KV trace       3 sequences" in out


def test_bad_values(capsys, tiny_artifact, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a")
    model = ("--model", tiny_artifact)
    for argv, code, words in [
        ((*model, "--bits", 7), 2, "this model has no 7 bits; choose from 2, 3"),
        ((*model, "--bits", 4, "--policy", "static"), 2, "--policy static has no effect"),
        ((*model, "--window", 129), 2, "--window must be from 2 to the model's 128 tokens, got 129"),
        ((*model, "--window", 16, "--stride", 17), 2, "--stride must be from 1 to the window of 16 tokens"),
        ((*model, "--text", tmp_path / "none.txt"), 2, "cannot read the text"),
        ((*model, "--text", short), 2, "too short"),
        ((*model, "--policy", "default"), 2, "add --kv-trace 16, or choose from static, uniform"),
        ((*model, "--policy", "nope", "--kv-trace", 2), 2, "unknown policy 'nope'"),
        ((*model, "--kv-trace", "nowhere"), 2, "a number of sequences or a JSONL file of arrivals, got 'nowhere'"),
        ((*model, "--vs", 7), 2, "this model has no 7 bits for --vs"),
        ((*model, "--vs", "nowhere.npz"), 2, "cannot read the run nowhere.npz: No such file"),
        (("--model", tmp_path / "no.pw"), 1, "no.pw"),
    ]:
        got, out, err = run(capsys, *argv)
        assert got == code and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize("trace", [(), ("--kv-trace", 2)])
def test_a_model_that_this_machine_has_no_room_for_is_refused(capsys, tiny_artifact, monkeypatch, trace):
    monkeypatch.setattr("pwjax.environment.memory_bytes", lambda: {"total": 2**16, "available": None})
    code, out, err = run(capsys, "--model", tiny_artifact, "--bits", 16, "--window", 32, "--quiet", *trace)
    assert code == 1 and out == "" and "has 64.00 KiB; give a --memory-budget that it holds" in err


def test_models_that_cannot_be_scored(tiny_params, tiny_config, tiny_tokenizer, tmp_path):
    bare = quantize(tiny_params, tiny_config, tmp_path / "bare.pw", lut_rows=32, page_words=64)
    with pytest.raises(ArtifactError, match="no tokenizer.json"):
        measure_perplexity(bare, [Document("t", TEXT)])
    huge = {**tiny_params, "lm_head": {"kernel": np.full_like(tiny_params["lm_head"]["kernel"], 3e38)}}
    out = quantize(huge, tiny_config, tmp_path / "o.pw", tokenizer=tiny_tokenizer, lut_rows=32, page_words=64)
    with pytest.raises(PWJaxError, match="not finite"):
        measure_perplexity(out, [Document("t", TEXT)], bits=4, **SHAPE)

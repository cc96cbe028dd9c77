"""Two runs over the same windows: figures by hand, divergence against the dense distributions, and files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.text import Tokenizer
from pwjax.errors import UsageError
from pwjax.evaluate import Document, Run, compare, measure_perplexity, paired_difference
from pwjax.evaluate.comparison import ratio_stderr
from pwjax.evaluate.windows import cut, tokenize
from pwjax.models import forward, logits

FOX = "The quick brown fox jumps over the lazy dog. "
TEXTS = [Document("fox", FOX * 6), Document("code", "def f(x): return x\n" * 9)]


# Runs are compared with the dense model's.
pytestmark = pytest.mark.usefixtures("exact_module")


@pytest.fixture(scope="module")
def runs(tiny_artifact, exact_module):
    artifact = Artifact.open(tiny_artifact)
    measure = lambda bits: measure_perplexity(artifact, TEXTS, bits=bits, window=32, batch=2, keep=True)  # noqa: E731
    return artifact, {bits: measure(bits) for bits in (16, 3)}


def test_paired_difference_by_hand():
    found = paired_difference(np.array([4.0, 6.0, 11.0]), np.array([3.0, 6.0, 9.0]), np.array([2, 2, 2]))
    assert found["difference"] == pytest.approx(0.5)
    # Of windows' means 0.5, 0 and 1: their standard deviation is 0.5.
    assert found["stderr"] == pytest.approx(0.5 / np.sqrt(3))
    low, high = found["interval_95"]
    assert 0 <= low < 0.5 < high <= 1
    same = paired_difference(np.arange(4.0), np.arange(4.0), np.full(4, 3))
    assert same == {"difference": 0, "stderr": 0, "interval_95": [0, 0]}
    assert paired_difference(np.ones(1), np.zeros(1), np.full(1, 2))["interval_95"] is None
    with pytest.raises(ValueError, match="same windows"):
        paired_difference(np.ones(2), np.ones(3), np.ones(3))


def test_pairing_takes_out_what_windows_share():
    rng = np.random.default_rng(0)
    hard = rng.normal(100, 30, 200)
    found = paired_difference(hard + 1 + rng.normal(0, 0.1, 200), hard, np.full(200, 50))
    low, high = found["interval_95"]
    assert 0.019 < low < found["difference"] < high < 0.021
    assert ratio_stderr(hard, np.full(200, 50)) > 100 * found["stderr"]


def test_divergence_is_that_of_the_distributions(runs):
    artifact, found = runs
    result = compare(artifact, found[3].run, found[16].run)
    kl, same = [], []
    tokenizer = Tokenizer.load(artifact.tokenizer_path)
    windows = [w.tokens for text in TEXTS for w in cut(tokenize(text, tokenizer, 300), 32, 32)]
    padded = np.stack([np.pad(tokens, (0, 32 - len(tokens))) for tokens in windows])

    @jax.jit
    def distributions(params):
        return jax.nn.log_softmax(logits(artifact.config, params, forward(artifact.config, params, padded).hidden), -1)

    dense = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), artifact.dense_params())
    expert = {bits: {**dense["layers"], "experts": artifact.expert_params(bits)} for bits in (16, 3)}
    p, q = (np.asarray(distributions({**dense, "layers": expert[bits]}), np.float64) for bits in (16, 3))
    for row, tokens in enumerate(windows):
        own = (row, slice(0, len(tokens) - 1))
        kl.append(float((np.exp(p[own]) * (p[own] - q[own])).sum()))
        same.append(int((p[own].argmax(-1) == q[own].argmax(-1)).sum()))
    np.testing.assert_allclose(result["window_kl"], kl, rtol=2e-2, atol=1e-4)
    assert result["window_top1"] == same and 0 < result["top1"] < 1
    assert result["kl"] == pytest.approx(sum(kl) / found[3].tokens, rel=1e-2)
    assert result["nll"]["difference"] == pytest.approx(found[3].mean_nll - found[16].mean_nll)


def test_a_run_against_itself(runs):
    artifact, found = runs
    result = compare(artifact, found[16].run, found[16].run)
    assert result["kl"] == 0 and result["top1"] == 1 and result["nll"]["difference"] == 0


def test_texts_have_figures_of_their_own(runs):
    facts = runs[1][16].to_json()
    assert [t["name"] for t in facts["texts"]] == ["fox", "code"] and facts["text"] == ["fox", "code"]
    assert sum(t["tokens"] for t in facts["texts"]) == facts["tokens"] == sum(facts["window_tokens"])
    alone = measure_perplexity(runs[0], TEXTS[1:], bits=16, window=32, batch=2)
    assert facts["texts"][1]["perplexity"] == pytest.approx(alone.perplexity, rel=1e-6)


def test_files_of_runs(runs, tmp_path):
    artifact, found = runs
    path = tmp_path / "run.npz"
    found[3].run.save(path)
    again = Run.load(path)
    assert compare(artifact, found[3].run, again)["kl"] == 0 and again.settings["bits"] == 3
    other = measure_perplexity(artifact, TEXTS[:1], bits=3, window=32, batch=2, keep=True)
    with pytest.raises(UsageError, match="of other windows"):
        compare(artifact, other.run, again)
    path.write_bytes(b"no run")
    with pytest.raises(UsageError, match="no run that"):
        Run.load(path)
    with pytest.raises(UsageError, match="cannot read the run .*No such file"):
        Run.load(tmp_path / "none.npz")

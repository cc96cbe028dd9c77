"""Text scored while KV grows beside it: what is scored, at which pressure, and what a budget must hold."""

import itertools
import json

import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.trace import Arrival
from pwjax.errors import BudgetError, UsageError
from pwjax.evaluate import KVTrace, PressureScorer, Scorer
from pwjax.evaluate.pressure import CHUNK, DECODE_TOKENS

pytestmark = pytest.mark.usefixtures("quick_programs")

WINDOW = 96
WINDOWS = [np.random.default_rng(i).integers(1, 300, n).astype(np.int32) for i, n in enumerate((WINDOW, 50, 2, WINDOW))]
TRACE = KVTrace(alike=4)
# The null page, the weights at 2 bits, and four sequences of a window: just enough.
PAGES = 1 + 48 + 192


@pytest.fixture(scope="module")
def scorer(tiny_artifact, budget_for):
    """``scorer(pages, **options)``: under an arena of that many pages, as the trace's engine has it."""
    artifact = Artifact.open(tiny_artifact)

    def load(pages=None, trace=TRACE, **options):
        shape = {"batch": 4, "context": WINDOW, "chunks": (CHUNK,), "kv_dtype": options.get("kv_dtype", "bfloat16")}
        known = {k: v for k, v in options.items() if k in ("policy", "bits")}
        budget = None if pages is None else budget_for(tiny_artifact, pages, **shape, **known)
        return PressureScorer.load(artifact, budget, trace, window=WINDOW, **options)

    return load


def run(opened):
    with opened as scorer:
        found = [one.nll for one in scorer.score(WINDOWS)]
        return np.concatenate(found), scorer.course, scorer.settings()


def test_fixed_bits_score_as_whole_windows_do(tiny_artifact, scorer):
    with Scorer.load(tiny_artifact, bits=4, window=WINDOW, batch=2, hidden=True) as whole:
        expected = list(whole.score(WINDOWS))
    with scorer(bits=4, kv_dtype="float32", trace=KVTrace()) as traced:
        found = list(traced.score(WINDOWS))
    for one, other in zip(found, expected, strict=True):
        assert one.nll.shape == other.nll.shape and one.hidden.shape == other.hidden.shape
        np.testing.assert_allclose(one.nll, other.nll, atol=2e-3)
        np.testing.assert_allclose(one.hidden, other.hidden, atol=2e-2)


def test_precision_moves_under_every_policy_at_the_same_pressure(scorer):
    # 192 pages of weights at 16 bits, 48 at 2; four sequences of 96 tokens take 192 pages of KV.
    courses = {}
    for policy in ("default", "uniform-dynamic", "static"):
        _, course, settings = run(scorer(PAGES, policy=policy))
        courses[policy] = course
        assert settings["memory"]["peak_bytes"] <= settings["memory"]["budget_bytes"]
        assert (settings["kv_trace"]["demotions"] > 0) == (policy != "static")
    tokens, kv = {tuple((t, k) for t, _, k, _ in c.timeline) for c in courses.values()}, []
    assert len(tokens) == 1, "text and KV advance alike, whatever the policy"
    for length in map(len, WINDOWS):
        for done in range(CHUNK, length - 1 + CHUNK, CHUNK):
            kv.append(4 * 4 * -(-min(done, length) // 8))  # 8 tokens a page, K and V of two layers, four sequences
    assert [k for _, k in next(iter(tokens))] == kv
    assert max(kv) == 192 and courses["default"].dropped == 0


def test_results_depend_on_the_settings_alone(scorer, monkeypatch):
    first = run(scorer(PAGES, policy="default"))
    # On a machine whose copies are slow, they must not be charged to an account that no time fills.
    slow = itertools.count(0, 10.0)
    monkeypatch.setattr("pwjax.memory.transfer.time.thread_time", lambda: next(slow))
    again = run(scorer(PAGES, policy="default"))
    np.testing.assert_array_equal(first[0], again[0])
    assert first[1] == again[1] and first[2]["kv_trace"]["demotions"] > 0


def test_the_smallest_budget_is_exact(scorer):
    with pytest.raises(BudgetError, match="--kv-trace takes 192 KV pages beside weights of 48") as caught:
        scorer(PAGES - 1, policy="default")
    with scorer(PAGES, policy="default") as opened:
        assert opened.engine.parts.memory.budget_bytes == caught.value.smallest_budget_bytes
        assert len(list(opened.score(WINDOWS[:1]))) == 1


def test_a_file_plays_on_across_windows_and_comes_again(scorer, tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"at_step": 0, "prompt_tokens": 8, "max_tokens": 8}, {"at_step": 3, "prompt_tokens": 8, "max_tokens": 16}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = KVTrace.parse(str(path))
    assert trace.boundaries == 7 and trace.arrivals[0] == Arrival(0, 8, 8)
    # They never run at the same time; three copies of each make it the shapes of the other tests.
    with scorer(PAGES, trace=KVTrace(trace.arrivals * 3), policy="default") as opened:
        assert opened.engine.parts.shapes.slots == 4
        list(opened.score(WINDOWS[:1]))
        timeline = opened.course.timeline
    # The last of 8, 16 and 24 boundaries is at place 0, 1 and 2 of the trace's 7: the first sequences have come, grown
    # to all of their tokens, and gone.
    held = [{0: 12, 1: 16, 2: 0}[(8 * n - 1) % 7] for n in (1, 2, 3)]
    own = [CHUNK * n for n in (1, 2, 3)]
    assert [k for _, _, k, _ in timeline] == [4 * (-(-o // 8) + 3 * -(-h // 8)) for o, h in zip(own, held, strict=True)]
    assert opened.course.boundaries == WINDOW // DECODE_TOKENS


def test_what_cannot_be_a_trace(scorer, tmp_path):
    assert KVTrace.parse("16") == KVTrace(alike=16)
    for text, words in [("0", "at least 1 sequence"), ("-3", "at least 1"), (str(tmp_path / "no"), "JSONL file")]:
        with pytest.raises(UsageError, match=words):
            KVTrace.parse(text)
    with pytest.raises(UsageError, match="a sequence of 200 tokens, but the model takes 128"):
        scorer(None, trace=KVTrace((Arrival(0, 100, 100),)))

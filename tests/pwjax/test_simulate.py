"""A trace played without weights: what it says is what an engine does."""

import json

import pytest
from pager_rig import FreeCopies

from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.trace import Arrival, read_trace, run_trace
from pwjax.errors import UsageError
from pwjax.loading import Injected, load, open_model, outlook
from pwjax.simulate import simulate

# What leaves an engine's programs, moves and pages in different use.
TRACES = {
    "burst": [Arrival(i // 4, 10 + i * 37 % 40, 20 + i * 53 % 60) for i in range(12)],
    "short prompts": [Arrival(i, 3 + i % 20, 10) for i in range(8)],
    "long prompts": [Arrival(i * 3, 70 + 7 * i, 8) for i in range(5)],
    "two bursts": [Arrival(i // 5 * 90 + i % 3, 40, 60) for i in range(10)],
    "single": [Arrival(0, 10, 8)],
    "trickle": [Arrival(9 * i, 1 + i * 29 % 100, 1 + i * 17 % 25) for i in range(15)],
}
# More than the lowest budget holds at once, so that precision gives way and comes back.
BURST = [Arrival(*row) for row in ((0, 40, 40), (1, 60, 60), (2, 20, 30), (3, 50, 70), (60, 5, 90))]


@pytest.fixture
def limit(tiny_artifact, budget_for):
    """Bytes of 290 pages: what the burst takes at its height (186) leaves the weights less than they begin with."""
    return budget_for(tiny_artifact, 290, batch=4)


class Punctual(FreeCopies):
    """Copies that have landed by the next boundary, as simulated ones have."""

    def submit(self, job):
        handle = super().submit(job)
        handle.result()
        return handle


# No time passes, so movement is not paced; in a simulation without cost neither.
NO_TIME = Injected(transfer=Punctual, clock=lambda: 0.0)


def simulated(path, memory_budget, policy, trace=BURST):
    view = outlook(Artifact.open(path), memory_budget_bytes=memory_budget, batch=4, policy=policy)
    return simulate(view, trace, page_s=0.0)


@pytest.mark.parametrize("policy", ["default", "paper", "uniform-dynamic", "static"])
def test_every_request_ends_within_the_budget(tiny_artifact, limit, policy):
    found = simulated(tiny_artifact, limit, policy)
    assert found.finished == len(BURST) and found.refused == 0
    assert 0 < found.peak_bytes <= found.budget_bytes
    assert found.steps == len(found.timeline)
    assert all(free >= 0 for _, _, _, free in found.timeline)
    assert max(kv for _, _, kv, _ in found.timeline) <= found.kv_peak_pages
    assert (found.demotions > 0) == (policy != "static")
    again = simulated(tiny_artifact, limit, policy)
    assert again.to_json() == found.to_json()


def test_a_prompt_of_any_length_is_refused_and_not_made(tiny_artifact, limit):
    found = simulated(tiny_artifact, limit, "static", [Arrival(0, 10**15, 5), Arrival(1, 4, 10**15)])
    assert (found.finished, found.refused) == (1, 1)


@pytest.mark.parametrize("policy", ["default", pytest.param("uniform-dynamic", marks=pytest.mark.slow)])
def test_an_engine_on_the_same_trace_agrees(tiny_artifact, limit, policy):
    found = simulated(tiny_artifact, limit, policy)
    with load(tiny_artifact, limit, batch=4, policy=policy, injected=NO_TIME) as engine:
        done = run_trace(engine, BURST)
        stats = engine.stats()
    assert sum(c.finish_reason != "refused" for c in done) == found.finished
    assert found.peak_bytes == pytest.approx(stats["memory"]["peak_bytes"], rel=0.01)
    assert found.kv_peak_pages == stats["memory"]["pages_kv_peak"]
    assert min(row[1] for row in found.timeline) == pytest.approx(stats["precision"]["mean_bits_min"], abs=0.25)
    assert found.preemptions == stats["scheduler"]["preemptions"]


QUICK = ("burst", "long prompts", "single")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TRACES])
def test_peaks_are_predicted_within_a_percent(tiny_artifact, limit, name):
    found = simulated(tiny_artifact, limit, "default", TRACES[name])
    with load(tiny_artifact, limit, batch=4, injected=NO_TIME) as engine:
        run_trace(engine, TRACES[name])
        peak = engine.stats()["memory"]["peak_bytes"]
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["burst", "long prompts", "two bursts"])
def test_peaks_of_the_bundled_model_are_predicted(name):
    """With copies that take their time, as in any engine."""
    trace = [Arrival(a.at_step, 6 * a.prompt_tokens, 2 * a.max_tokens) for a in TRACES[name]]
    memory = outlook(open_model(None), batch=4, context=1024).memory
    limit = memory.smallest_budget_bytes + (memory.total_bytes - memory.smallest_budget_bytes) // 3
    found = simulate(outlook(open_model(None), memory_budget_bytes=limit, batch=4, context=1024), trace)
    with load(None, limit, batch=4, context=1024) as engine:
        run_trace(engine, trace)
        stats = engine.stats()
    assert found.demotions and stats["precision"]["demotions"]
    assert found.peak_bytes == pytest.approx(stats["memory"]["peak_bytes"], rel=0.01)


@pytest.mark.parametrize("policy", ["default", pytest.param("uniform-dynamic", marks=pytest.mark.slow)])
def test_what_waits_for_its_turn_is_in_the_predicted_peak(policy):
    # Promotions come in between, and in an engine are staged, waiting, when the next prompt's program runs.
    trace, shape = [Arrival(25 * i, 50, 30) for i in range(6)], {"batch": 8, "policy": policy}
    found = simulate(outlook(open_model(None), memory_budget_bytes=22 << 20, **shape), trace)
    with load(None, 22 << 20, **shape) as engine:
        run_trace(engine, trace)
        peak = engine.stats()["memory"]["peak_bytes"]
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)


def test_traces_are_read_and_sorted(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_step": 9, "prompt_tokens": 3, "max_tokens": 4}\n\n'
        '{"arrival_s": 0.1, "prompt_tokens": 5, "max_tokens": 6}\n'
    )
    assert read_trace(path, step_ms=20) == [Arrival(5, 5, 6), Arrival(9, 3, 4)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "line 1: a request is an object"),
        ("{", "not JSON"),
        (json.dumps({"at_step": 1, "arrival_s": 1, "prompt_tokens": 1, "max_tokens": 1}), "exactly one of"),
        (json.dumps({"at_step": -1, "prompt_tokens": 1, "max_tokens": 1}), "at_step must be a whole number"),
        (json.dumps({"at_step": 10**30, "prompt_tokens": 1, "max_tokens": 1}), "at_step must be a whole number from 0"),
        (json.dumps({"at_step": 1, "prompt_tokens": 0, "max_tokens": 1}), "prompt_tokens must be"),
        (json.dumps({"at_step": 1, "prompt_tokens": 1}), "max_tokens must be"),
        (json.dumps({"arrival_s": "x", "prompt_tokens": 1, "max_tokens": 1}), "arrival_s must be seconds"),
        (json.dumps({"at_step": 1, "prompt_tokens": 1, "max_tokens": 1, "id": 1}), "unknown key 'id'"),
        ("", "holds no request"),
    ],
)
def test_bad_traces_name_the_line(tmp_path, line, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=words):
        read_trace(path, 20)

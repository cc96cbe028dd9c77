"""A trace played without weights: what it says is what an engine does."""

import json

import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.trace import Arrival, read_trace, run_trace
from pwjax.errors import UsageError
from pwjax.loading import Injected, load, outlook
from pwjax.memory import ThreadTransfer
from pwjax.simulate import simulate

# More KV than fits beside the weights at 6 bits, so that precision gives way and comes back.
BURST = [Arrival(*row) for row in ((0, 40, 80), (1, 60, 60), (2, 20, 100), (3, 50, 70), (4, 5, 30), (60, 5, 90))]
# The shapes of the other tests of engines: their programs are compiled once.
SHAPES = {"batch": 4, "context": 128}


@pytest.fixture
def limit(tiny_artifact):
    """A budget that gives exactly 290 pages."""
    memory = outlook(Artifact.open(tiny_artifact), **SHAPES).memory
    return memory.total_bytes - memory.arena_bytes + 290 * memory.page_bytes


class Punctual(ThreadTransfer):
    """Copies that have landed by the next boundary, as simulated ones have."""

    def submit(self, job):
        handle = super().submit(job)
        handle.result()
        return handle


def simulated(path, limit, policy):
    return simulate(outlook(Artifact.open(path), memory_budget_bytes=limit, policy=policy, **SHAPES), BURST)


@pytest.mark.parametrize("policy", ["default", "paper", "uniform-dynamic", "static"])
def test_every_request_ends_within_the_budget(tiny_artifact, limit, policy):
    found = simulated(tiny_artifact, limit, policy)
    assert found.finished == len(BURST) and found.refused == 0
    assert 0 < found.peak_bytes <= found.budget_bytes
    assert found.steps == len(found.timeline)
    assert all(free >= 0 for _, _, _, free in found.timeline)
    assert max(kv for _, _, kv, _ in found.timeline) <= found.kv_peak_pages
    assert (found.demotions > 0) == (policy != "static")
    assert simulated(tiny_artifact, limit, policy).to_json() == found.to_json()


@pytest.mark.parametrize("policy", ["default", pytest.param("uniform-dynamic", marks=pytest.mark.slow)])
def test_an_engine_on_the_same_trace_agrees(tiny_artifact, limit, policy):
    found = simulated(tiny_artifact, limit, policy)
    with load(tiny_artifact, limit, policy=policy, injected=Injected(transfer=Punctual), **SHAPES) as engine:
        done = run_trace(engine, BURST)
        stats = engine.stats()
    assert sum(c.finish_reason != "refused" for c in done) == found.finished
    assert found.peak_bytes == pytest.approx(stats["memory"]["peak_bytes"], rel=0.01)
    assert found.kv_peak_pages == stats["memory"]["pages_kv_peak"]
    assert min(row[1] for row in found.timeline) == pytest.approx(stats["precision"]["mean_bits_min"], abs=0.25)
    assert found.preemptions == stats["scheduler"]["preemptions"]


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

"""The engine when memory runs out: preemption changes nothing that was said, and every request comes to its end."""

import numpy as np
import pytest

import pwjax
from pallas_kernels import native
from planner import promote
from pwjax.engine.decisions import Live
from pwjax.engine.sequence import Completion
from pwjax.loading import Injected
from pwjax.memory.transfer import SyncTransfer


def run(engine, requests, turns: int) -> list[Completion]:
    """Completions of all requests; fails where they take more than ``turns`` turns of the loop."""
    for request in requests:
        engine.submit(request)
    done = []
    for _ in range(turns):
        done += [e for e in engine.step() if isinstance(e, Completion)]
        if engine.idle:
            return done
    raise AssertionError(f"{len(done)} of {len(requests)} requests ended within {turns} turns")


def test_a_preempted_request_goes_on_where_it_was(open_tiny):
    sampling = pwjax.SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
    requests = [pwjax.Request(i, None, tuple(range(7 * i + 1, 9 * i + 12)), sampling) for i in range(3)]
    with open_tiny(bits=5) as engine:
        calm = {c.id: c for c in run(engine, requests, 500)}
        engine.scheduler.reserve_all = False
        for request in requests:
            engine.submit(request)
        disturbed = {}
        while not engine.idle:
            if engine.boundaries.index % 2 == 0:
                before = [list(s.generated) for s in engine.scheduler.running]
                sequence = engine.scheduler.preempt_newest()
                assert sequence is None or sequence.generated == before[-1]
            disturbed |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
        assert engine.stats()["scheduler"]["preemptions"] > 3
        engine.parts.kv.check_invariants()
    for key, result in calm.items():
        assert disturbed[key].token_ids == result.token_ids
        got, want = ([entry["logprob"] for entry in c.logprobs] for c in (disturbed[key], result))
        np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.skipif(bool(native.problem()), reason="XLA's kernels sum in an order that shapes change")
@pytest.mark.parametrize("bits", (3, 16))
def test_what_is_computed_again_in_a_prompt_s_shapes_is_what_was_decoded(bits):
    # The model whose router and roundings make most of a last bit that differs.
    prompt = tuple(np.random.default_rng(bits).integers(1, 4000, 90).tolist())
    sampling = pwjax.SamplingParams(max_tokens=100, logprobs=0, ignore_eos=True)
    with pwjax.load(bits=bits, batch=2) as engine:
        made = engine.generate([pwjax.Request(0, None, prompt, sampling)])[0]
        scores = engine.score([[*prompt, *made.token_ids]])[0][len(prompt) - 1 :]
    # All that is left is the order in which a distribution's probabilities are summed.
    np.testing.assert_allclose(scores, [entry["logprob"] for entry in made.logprobs], atol=5e-6)


def random_requests(count: int, seed: int) -> list[pwjax.Request]:
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt, new = rng.integers(1, 80), rng.integers(1, 47)
        sampling = pwjax.SamplingParams(max_tokens=int(new), ignore_eos=True)
        requests.append(pwjax.Request(i, None, tuple(rng.integers(1, 300, prompt).tolist()), sampling))
    return requests


@pytest.mark.parametrize(
    ("pages", "count"), [(1 + 48 + 100, 20), pytest.param(1 + 48 + 66, 500, marks=pytest.mark.slow)]
)
def test_every_request_ends_in_a_budget_that_is_barely_enough(open_tiny, pages, count):
    # The lowest weights take 48 pages and the longest request 64: what is left is two pages, or half a sequence.
    requests = random_requests(count, seed=1)
    with open_tiny(pages) as engine:
        done = {c.id: c for c in run(engine, requests, 100 * count)}
        stats = engine.stats()
        engine.parts.pager.check_invariants()
        engine.parts.kv.check_invariants()
    for request in requests:
        assert done[request.id].generated_tokens == request.sampling.max_tokens
    assert stats["scheduler"]["preemptions"] > 0
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]


def test_scores_are_the_log_probabilities_that_generation_reports(open_tiny):
    sampling = pwjax.SamplingParams(max_tokens=20, logprobs=0, ignore_eos=True)
    with open_tiny(bits=5) as engine:
        prompt = tuple(range(5, 40))
        made = engine.generate([pwjax.Request(0, None, prompt, sampling)])[0]
        whole = [*prompt, *made.token_ids]
        scores = engine.score([whole, "The quick brown fox", whole[:20]])
        assert [len(s) for s in scores] == [54, len(engine.tokenizer.encode("The quick brown fox")) - 1, 19]
        np.testing.assert_allclose(scores[0][34:], [entry["logprob"] for entry in made.logprobs], atol=1e-3)
        np.testing.assert_allclose(scores[2], scores[0][:19], atol=1e-5)
        np.testing.assert_array_equal(engine.score(whole)[0], scores[0])
        stats = engine.stats()
        assert stats["compile"]["recompiles_after_warmup"] == 0 and engine.idle
        assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
        with pytest.raises(pwjax.PromptError, match="129 tokens"):
            engine.score([1] * 129)


class Grasping(Live):
    """Gives up what its policy gives up, and else spends every page that seems spare on precision."""

    def __init__(self):
        pass  # of an engine that is not there yet

    def plan(self, observation):
        plan = super().plan(observation)
        if plan is not None and plan.released_pages > 0:
            return plan
        spare = max(0, observation.headroom_pages)
        return promote(self.table, observation.bits, spare, spare, observation.moving, "all of it")


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_starves_a_request_that_waits(open_tiny, seed):
    # Prompts that stay cached count as free, so that promotions may take pages which a waiting request needs now.
    decisions = Grasping()
    with open_tiny(290, injected=Injected(transfer=SyncTransfer, clock=lambda: 0.0, decisions=decisions)) as engine:
        decisions.table, decisions._policy = engine.parts.table, engine.parts.policy
        done = run(engine, random_requests(12, seed), 1500)
        assert sorted(c.id for c in done) == list(range(12))
        assert engine.parts.pager.counters.promotions
        engine.parts.allocator.check_invariants()

"""Shared prompts in the engine: tokens of an unshared run, fewer pages and chunks, one price for all pages."""

import json
from dataclasses import replace

import numpy as np
import pytest

import pwjax
from planner import next_demotion, uniform
from pwjax.engine.replay import replay
from pwjax.engine.sequence import Completion

# A page holds 8 tokens and a chunk 20, so most chunks end inside of a page.
SHAPES = {"chunks": (20,)}
BASE = tuple(np.random.default_rng(0).integers(1, 300, 90).tolist())
GREEDY = pwjax.SamplingParams(max_tokens=10, ignore_eos=True, logprobs=1)


def ragged(count: int = 8) -> list[pwjax.Request]:
    """Prompts that part from one another at all places of a chunk, greedy and sampled."""
    requests = []
    for i, cut in enumerate((45, 60, 61, 80, 20, 41, 90, 39)[:count]):
        prompt = BASE[:cut] + tuple(range(7 * i + 1, 7 * i + 1 + (0, 1, 9, 14)[i % 4]))
        sampling = GREEDY.with_fields(temperature=0.9, top_p=0.95) if i % 2 else GREEDY
        requests.append(pwjax.Request(i, None, prompt, sampling))
    return requests


def check(engine) -> None:
    engine.parts.prefixes.check_invariants()
    engine.parts.pager.check_invariants()


def test_a_shared_run_gives_the_tokens_of_an_unshared_one(open_tiny):
    requests = ragged()
    with open_tiny(400, bits=5, **SHAPES, prefix_cache=False) as engine:
        want = engine.generate(requests)
        assert engine.stats()["prefixes"]["hits"] == 0 and engine.parts.kv.used_pages == 0
        alone = engine.stats()["memory"]["pages_kv_peak"]
    with open_tiny(400, bits=5, **SHAPES) as engine:
        for request in requests:
            engine.submit(request)
        done = {}
        while not engine.idle:
            done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
            check(engine)
        together = engine.stats()
        again = [engine.generate([request])[0] for request in reversed(requests)][::-1]
        scores = engine.score(BASE)
        stats = engine.stats()
        check(engine)
        # Sequences took turns, and the prompt of each was found, but for its last, unfinished chunk.
        saved = stats["prefixes"]["tokens_saved"] - together["prefixes"]["tokens_saved"]
        assert saved == sum((len(r.prompt_token_ids) - 1) // 20 * 20 for r in requests)
        engine.parts.prefixes.evict()
        np.testing.assert_array_equal(engine.score(BASE), scores)
        assert engine.parts.kv.used_pages == 0 and engine.parts.allocator.free_pages > 200
        table, bits = engine.parts.table, engine.parts.pager.committed
        assert next_demotion(table, bits, floor_bits=5) == next_demotion(table, np.full_like(bits, 2)) == np.inf
        rate = (table.expected[5, 0] - table.expected[5, 1]) / (table.pages[5, 1] - table.pages[5, 0])
        assert next_demotion(table, np.full_like(bits, 3), frozen=np.arange(len(bits)) != 5) == max(rate, 0)
    for result, first, second in zip(want, [done[r.id] for r in requests], again, strict=True):
        assert result == first == second
    assert together["prefixes"]["hits"] >= 6 and together["prefixes"]["tokens_saved"] >= 200
    assert together["memory"]["pages_kv_peak"] < alone + 60
    assert stats["compile"]["recompiles_after_warmup"] == 0
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]


@pytest.mark.slow
def test_eviction_preemption_and_cancelling_keep_every_promise_and_repeat(open_tiny, tmp_path):
    long = GREEDY.with_fields(max_tokens=30, temperature=0.7, logprobs=None)
    # Room for the lowest weights and one and a half sequences.
    with open_tiny(1 + 48 + 100, **SHAPES, log=tmp_path / "log") as engine:
        for turn in range(3):
            for request in ragged(6):
                engine.submit(replace(request, id=f"{turn}.{request.id}", sampling=long))
        done = []
        while not engine.idle:
            done += [e for e in engine.step() if isinstance(e, Completion)]
            if engine.boundaries.index == 30:
                done += engine.cancel(["1.0", "1.1", "2.1"])
            check(engine)
        stats = engine.stats()
    assert all(c.finish_reason == "length" for c in done) and len(done) >= 15
    assert stats["prefixes"]["hits"] > 0 and stats["prefixes"]["evicted"] > 0
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {"evict", "preempt"} <= {r["kind"] for r in records}
    result = replay(tmp_path / "log")
    assert result.complete and result.requests >= len(done)


@pytest.mark.slow
@pytest.mark.parametrize("damage_per_ms", [0.0, 1e9])
def test_the_cheaper_of_eviction_and_demotion_goes_first(open_tiny, tmp_path, damage_per_ms):
    """The same run but for what a millisecond is worth: the cache goes and precision stays, or the other way round."""
    with open_tiny(290, **SHAPES, log=tmp_path / "log", damage_per_ms=damage_per_ms) as engine:
        engine.generate([pwjax.Request(i, None, BASE, GREEDY) for i in range(2)])
        cached = engine.parts.prefixes.evictable_pages
        assert cached == 80 // 8 * 4 and engine.parts.prefixes.reuse > 0
        demotions = engine.stats()["precision"]["demotions"]
        others = [pwjax.Request(i, None, BASE[i:] + BASE[:i], GREEDY) for i in range(1, 4)]
        for request in others:
            engine.submit(request)
        while not (engine.stats()["prefixes"]["evicted"] or engine.stats()["precision"]["demotions"] > demotions):
            engine.step()
            assert not engine.idle
        evicted, lower = engine.stats()["prefixes"]["evicted"], engine.stats()["precision"]["demotions"] > demotions
        assert (evicted > 0, lower) == ((True, False) if damage_per_ms == 0 else (False, True))


@pytest.mark.slow
def test_what_was_computed_at_other_bits_is_not_shared_where_bits_are_promised(open_tiny):
    def first_token(engine, **demand):
        before = engine.stats()["prefixes"]["hits"]
        engine.generate([pwjax.Request("a", None, BASE, GREEDY, **demand)])
        return engine.stats()["prefixes"]["hits"] - before

    with open_tiny(290, **SHAPES, policy="static") as engine:
        assert [first_token(engine) for _ in range(2)] == [0, 1]
        engine.apply(uniform(engine.parts.table, 4))
        engine.settle()
        assert [first_token(engine) for _ in range(2)] == [0, 1]
        check(engine)
    with open_tiny(290, **SHAPES) as engine:
        assert first_token(engine) == 0
        engine.boundaries.request(uniform(engine.parts.table, 4))
        engine.settle()
        assert first_token(engine) == 1 and first_token(engine, min_bits=2) == 0 and first_token(engine) == 1
        check(engine)

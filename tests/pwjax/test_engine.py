"""The engine end to end on a tiny model: oracles, frozen plans, pressure, refusals, determinism."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from pager_rig import FreeCopies
from prompts import PROMPTS

import pwjax
from planner import uniform
from pwjax import models
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.sequence import Completion, Piece
from pwjax.engine.steps import compile_step
from pwjax.engine.weights import params_spec
from pwjax.errors import BudgetError, PromptError, PWJaxError, UsageError
from pwjax.loading import Injected, load, outlook
from pwjax.memory import BoundaryReport, program_memory

GREEDY = pwjax.SamplingParams(max_tokens=20, ignore_eos=True)


@partial(jax.jit, static_argnums=0)
def dense_logits(config, params, tokens, lengths):
    """Whole sequences through the dense form: one program for all prompts and weights of one padded length."""
    return models.logits(config, params, models.forward(config, params, tokens, lengths).hidden)


def dense_greedy(artifact: Artifact, prompt: tuple[int, ...], count: int, expert_params: dict) -> list[int]:
    """The oracle: whole forwards of the dense form, one token at a time, in sequences padded to 40 tokens."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float32), artifact.dense_params())
    params["layers"]["experts"] = expert_params
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(tokens)] = tokens
        scores = dense_logits(artifact.config, params, padded, np.array([len(tokens)]))
        tokens.append(int(np.argmax(scores[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("bits", [16, 6, 2])
def test_generation_equals_the_dense_form_with_the_same_weights(exact_activations, open_tiny, tiny_artifact, bits):
    artifact = Artifact.open(tiny_artifact)
    with open_tiny(400, bits=bits, kv_dtype="float32") as engine:
        results = engine.generate(PROMPTS[:3], GREEDY)
        weights = artifact.expert_params(bits)
        for prompt, result in zip(PROMPTS, results, strict=False):
            ids = tuple(engine.tokenizer.encode(prompt))
            assert result.token_ids == dense_greedy(artifact, ids, 20, weights)
            assert result.finish_reason == "length"


def test_functional_forward_equals_the_dense_form(exact_activations, open_tiny, tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % 300
    with open_tiny(bits=4) as engine, engine.frozen() as (params, table, arena):
        got = jax.jit(pwjax.forward, static_argnums=0)(engine.model, params, table, arena, tokens)
        with pytest.raises(PWJaxError, match="frozen"):
            engine.step()
    dense = artifact.dense_params()
    dense["layers"]["experts"] = artifact.expert_params(4)
    want = dense_logits(artifact.config, dense, tokens, None)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_request_does_not_depend_on_its_neighbours(open_tiny):
    sampled = pwjax.SamplingParams(max_tokens=16, temperature=0.9, top_k=40, top_p=0.95, seed=5, logprobs=2)
    with open_tiny(bits=5) as engine:
        together = engine.generate(PROMPTS, sampled)
        alone = [engine.generate([p], sampled)[0] for p in PROMPTS]
        assert engine.stats()["compile"]["recompiles_after_warmup"] == 0
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    for result in alone:
        assert len(result.logprobs) == result.generated_tokens
        assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in result.logprobs)


def test_pieces_concatenate_to_the_text(open_tiny):
    requests = [pwjax.Request(i, p, None, GREEDY) for i, p in enumerate(PROMPTS)]
    pieces = {}
    with open_tiny() as engine:
        for event in engine.stream(requests):
            if isinstance(event, Piece):
                pieces[event.id] = pieces.get(event.id, "") + event.text
            else:
                assert pieces.get(event.id, "") == event.text


def test_precision_moves_with_the_kv_cache(open_tiny, tmp_path):
    long = pwjax.SamplingParams(max_tokens=110, ignore_eos=True)
    # A clock that stands still: pacing would make what moves depend on the speed of the machine.
    still = Injected(transfer=FreeCopies, clock=lambda: 0.0)
    with open_tiny(log=tmp_path / "log.jsonl", injected=still) as engine:
        requests = [pwjax.Request(f"r{i}", PROMPTS[i % 6], None, long) for i in range(12)]
        requests += [pwjax.Request("last", PROMPTS[0], None, long)]
        done = [e for e in engine.stream(requests) if isinstance(e, Completion)]
        stats = engine.stats()
        engine.parts.pager.check_invariants()
        engine.parts.kv.check_invariants()
    assert sorted(c.id for c in done) == sorted(r.id for r in requests)
    memory, precision = stats["memory"], stats["precision"]
    assert 0 < memory["peak_bytes"] <= memory["budget_bytes"]
    assert memory["pages_kv_peak"] + 120 > memory["pages_total"] - 1
    assert precision["mean_bits_min"] < precision["mean_bits_start"]
    assert precision["demotions"] > 0 and precision["promotions"] > 0
    assert stats["compile"]["recompiles_after_warmup"] == 0 and stats["transfers"]["failed"] == 0
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records[0]["kind"] == "header" and {"plan", "commit", "admit", "finish"} <= {r["kind"] for r in records}
    changes = [change for r in records if r["kind"] == "commit" for change in r["changes"]]
    down = sum(to < was for _, was, to, *_ in changes)
    assert (down, len(changes) - down) == (precision["demotions"], precision["promotions"])


def test_a_frozen_plan_gives_the_tokens_of_a_static_run_at_those_bits(open_tiny):
    with open_tiny() as engine:
        for i in range(8):
            engine.submit(pwjax.Request(i, PROMPTS[i % 6], None, pwjax.SamplingParams(max_tokens=100, ignore_eos=True)))
        while engine.stats()["precision"]["demotions"] < 8 and not engine.idle:
            engine.step()
        engine.cancel()
        bits = engine.freeze()
        assert len(set(bits.tolist())) > 1
        moved = engine.generate(PROMPTS, GREEDY)
        engine.parts.pager.check_invariants()
    with open_tiny(bits=bits) as engine:
        static = engine.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in moved] == [r.token_ids for r in static]


def test_a_plan_applied_by_hand_takes_effect(open_tiny):
    with open_tiny(policy="static") as engine:
        before = engine.parts.pager.committed
        up = pwjax.plan(engine.observe(), target_bytes=-60 * 256)
        engine.apply(up)
        engine.settle()
        raised = engine.parts.pager.committed
        assert np.array_equal(raised, up.bits) and np.any(raised > before) and np.all(raised >= before)
        down = pwjax.plan(engine.observe(), target_bytes=20 * 256)
        engine.apply(down)
        engine.settle()
        after = engine.parts.pager.committed
        assert down.met and np.array_equal(after, down.bits) and np.any(after < raised)


def test_preemption_is_the_last_resort_and_loses_nothing(open_tiny):
    # Room for the lowest weights and one and a half sequences: four slots must take turns.
    long = pwjax.SamplingParams(max_tokens=100, ignore_eos=True)
    with open_tiny(1 + 48 + 100) as engine:
        results = engine.generate(PROMPTS[:5], long)
        stats = engine.stats()
    assert [r.generated_tokens for r in results] == [100] * 5
    assert stats["scheduler"]["preemptions"] > 0
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]


def test_a_first_request_larger_than_the_free_pages_gets_them_from_demotions(open_tiny):
    # Room for the lowest weights (48) and one sequence (64), but not beside the weights at 5 bits.
    with open_tiny(1 + 48 + 100) as engine:
        engine.apply(uniform(engine.parts.table, 5))
        engine.settle()
        assert engine.parts.allocator.free_pages < engine.parts.kv.pages_for(121)
        result = engine.generate([pwjax.Request("a", None, tuple(range(1, 121)), GREEDY)])[0]
        assert result.finish_reason == "length" and result.generated_tokens == 8
        assert engine.stats()["precision"]["demotions"] > 0


@pytest.mark.parametrize("queued", ["promotions", "demotions"])
def test_moves_that_find_no_free_page_do_not_hold_sequences_up(open_tiny, monkeypatch, queued):
    long = pwjax.SamplingParams(max_tokens=100, ignore_eos=True)
    with open_tiny(1 + 48 + 100) as engine:
        pager, table = engine.parts.pager, engine.parts.table
        monkeypatch.setattr(engine.parts.policy, "step", lambda observation: None)
        for i in range(4):
            engine.submit(pwjax.Request(i, PROMPTS[i], None, long))
        events = engine.step()
        if queued == "promotions":
            assert engine.parts.allocator.free_pages < table.total_pages(16) - table.total_pages(pager.committed)
            engine.apply(uniform(table, 16))
        else:
            monkeypatch.setattr(type(pager), "idle", property(lambda self: False))
            report = BoundaryReport(1, 1, blocked_pages=1, queued=1)
            monkeypatch.setattr(pager, "boundary", lambda index, outcome, **_: replace(report, boundary=index))
        events += [event for _ in range(2000) for event in engine.step()]
        done = [e for e in events if isinstance(e, Completion)]
        assert sorted(c.id for c in done) == [0, 1, 2, 3] and engine.idle
        for completion in done:
            assert completion.text == "".join(e.text for e in events if e.id == completion.id and isinstance(e, Piece))
        assert engine.stats()["scheduler"]["preemptions"] > 0
        engine.parts.kv.check_invariants()


def test_budget_too_small_names_the_smallest_that_works(tiny_artifact):
    with pytest.raises(BudgetError, match="needs (\\d+) bytes") as caught:
        load(tiny_artifact, 10_000, batch=4)
    smallest = int(str(caught.value).split("needs ")[1].split(" bytes")[0])
    with load(tiny_artifact, smallest, batch=4) as engine:
        assert engine.generate("The", GREEDY)[0].generated_tokens == 20
        assert engine.stats()["memory"]["peak_bytes"] <= smallest
    with pytest.raises(BudgetError):
        load(tiny_artifact, smallest - 1, batch=4)


def test_prompts_that_can_never_run(open_tiny):
    with open_tiny(bits=2) as engine:
        for ids, words in (((1,) * 128, "128 tokens"), ((1,) * 500, "500 tokens"), ((300,), "0 to 299"), ((-1,), "-1")):
            with pytest.raises(PromptError, match=words):
                engine.generate([pwjax.Request("a", None, ids, GREEDY)])
        result = engine.generate([pwjax.Request("a", None, (1,) * 127, GREEDY)])[0]
        assert result.finish_reason == "length" and result.generated_tokens == 1
        mixed = [pwjax.Request("bad", None, (1,) * 200), pwjax.Request("good", "The", None, GREEDY)]
        done = {e.id: e for e in engine.stream(mixed) if isinstance(e, Completion)}
        assert done["bad"].finish_reason == "refused" and "200 tokens" in done["bad"].error
        assert done["good"].generated_tokens == 20


def test_stop_strings_and_tokens(open_tiny):
    with open_tiny(bits=16) as engine:
        free = engine.generate(PROMPTS[0], GREEDY)[0]
        by_token = engine.generate(PROMPTS[0], GREEDY.with_fields(stop_token_ids=(free.token_ids[3],)))[0]
        first = free.token_ids.index(free.token_ids[3])
        assert by_token.token_ids == free.token_ids[: first + 1] and by_token.finish_reason == "stop"
        text = free.text[2:5]
        by_text = engine.generate(PROMPTS[0], GREEDY.with_fields(stop=(text,)))[0]
        assert by_text.text == free.text[: free.text.index(text)] and by_text.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 7}, "2, 3, 4, 5, 6, 16"),
        ({"policy": "greedy"}, "default, paper, static"),
        ({"context": 129}, "128"),
        ({"batch": 0}, "batch"),
        ({"kv_dtype": "int8"}, "bfloat16, float32"),
        ({"memory_budget": "10 potatoes"}, "size"),
    ],
)
def test_bad_options_are_one_sentence(tiny_artifact, options, words):
    with pytest.raises(UsageError, match=words):
        load(tiny_artifact, **options)


def test_kv_rows_that_no_page_holds_are_refused_with_a_way_out(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    artifact.config = replace(artifact.config, num_heads=16, num_kv_heads=16)
    with pytest.raises(UsageError, match="256 bytes.*takes 512 in float32; use --kv-dtype bfloat16"):
        outlook(artifact, kv_dtype="float32")


def test_cancelled_work_frees_its_pages(open_tiny):
    with open_tiny(bits=3) as engine:
        free = engine.parts.allocator.free_pages
        stream = engine.stream([pwjax.Request(i, p, None, GREEDY) for i, p in enumerate(PROMPTS)])
        next(stream)
        stream.close()
        assert engine.idle and engine.parts.allocator.free_pages == free
        assert engine.generate("The", GREEDY)[0].generated_tokens == 20


def test_sizes_of_steps_do_not_depend_on_the_arena(tiny_artifact):
    view = outlook(Artifact.open(tiny_artifact), batch=4, context=128)
    sizes = []
    for pages in (290, 29_000):
        memory = program_memory(compile_step(view.shapes, ("decode", 4), pages, params_spec(view.shapes.config)))
        sizes.append((memory.temp_bytes, memory.output_bytes, memory.argument_bytes - pages * 256))
    assert sizes[0] == sizes[1]

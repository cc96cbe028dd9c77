"""The engine as a library: what it takes, and what it says when it is handed something else."""

import jax
import pytest

import pwjax


@pytest.fixture(scope="module")
def engine(tiny_artifact):
    with pwjax.load(tiny_artifact, batch=2, context=64) as engine:
        yield engine


FOUR = pwjax.SamplingParams(max_tokens=4, ignore_eos=True)


def test_generate_and_stream_take_the_same(engine):
    request = pwjax.Request(0, "The quick", None, FOUR)
    expected = engine.generate(["The quick"], FOUR)
    assert engine.generate("The quick", FOUR) == engine.generate(request) == engine.generate([request]) == expected
    assert engine.generate((p for p in ["The quick"]), FOUR) == expected
    for form in ("The quick", ["The quick"], request, [request]):
        *pieces, completion = engine.stream(form, FOUR)
        assert completion == expected[0] and "".join(p.text for p in pieces) == completion.text


@pytest.mark.parametrize("prompt", [5, b"bytes", None, [[1, 2]], [None], [5]])
def test_what_is_no_prompt_is_named(engine, prompt):
    for call in (engine.generate, lambda p: list(engine.stream(p))):
        with pytest.raises(pwjax.PromptError, match=r"prompt 0 is .*give a string, or pwjax.Request"):
            call(prompt)
    assert engine.idle


def test_settling_counts_like_generating(engine):
    plan = pwjax.plan(engine.observe(), target_bytes=1 << 14)
    with engine.frozen():
        for change in (engine.settle, engine.step, lambda: engine.apply(plan), lambda: engine.generate("x", FOUR)):
            with pytest.raises(pwjax.PWJaxError, match="frozen"):
                change()
    engine.apply(plan)
    engine.settle()
    precision = engine.stats()["precision"]
    assert precision["mean_bits_min"] == precision["mean_bits_end"] < precision["mean_bits_start"]


def test_a_closed_engine_says_so(tiny_artifact):
    engine = pwjax.load(tiny_artifact, batch=2, context=64)
    engine.close()
    engine.close()
    device = (engine.parts.params, engine.parts.arena.array, engine.parts.page_table.table, engine.parts.kv.table)
    assert all(array.is_deleted() for array in jax.tree.leaves(device))
    for use in (lambda: engine.generate("x", FOUR), engine.step, engine.settle, lambda: list(engine.stream("x"))):
        with pytest.raises(pwjax.PWJaxError, match="the engine is closed"):
            use()
    assert engine.stats()["precision"]["epochs"] >= 1

"""The engine as a library: what it takes, and what it says when it is handed something else."""

import json
import signal

import jax
import numpy as np
import pytest

import pwjax
from planner import uniform
from pwjax.engine.boundary import PHASES
from pwjax.engine.sequence import Completion
from pwjax.errors import UsageError
from pwjax.loading import open_model


@pytest.fixture(scope="module")
def engine(open_tiny):
    with open_tiny() as engine:
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


@pytest.mark.parametrize("prompt", [5, b"bytes", None, [[1, 2]], [None], [5], {"prompt": "text"}])
def test_what_is_no_prompt_is_named(engine, prompt):
    for call in (engine.generate, lambda p: list(engine.stream(p))):
        with pytest.raises(pwjax.PromptError, match=r"prompt 0 is .*give a string, or pwjax.Request"):
            call(prompt)
    assert engine.idle


def test_settling_counts_like_generating(open_tiny):
    with open_tiny() as engine:  # its own: what others left on its way would count too
        plan = pwjax.plan(engine.observe(), target_bytes=1 << 14)
        with engine.frozen():
            for change in (engine.settle, engine.step, lambda: engine.apply(plan), lambda: engine.generate("x", FOUR)):
                with pytest.raises(pwjax.PWJaxError, match="frozen"):
                    change()
        engine.apply(plan)
        engine.settle()
        precision = engine.stats()["precision"]
    assert precision["mean_bits_min"] == precision["mean_bits_end"] < precision["mean_bits_start"]


def requests_of(ids, tokens):
    sampling = pwjax.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [pwjax.Request(i, f"{i} quick brown", None, sampling) for i in ids]


def test_what_runs_beside_a_call_is_neither_lost_nor_taken_for_its_own(open_tiny):
    with open_tiny(bits=4) as engine:
        alone = {c.id: c.text for c in engine.generate(requests_of("abcd", 30))}
        mine, other = requests_of("ab", 30), requests_of("cd", 30)
        for request in mine:
            engine.submit(request)
        assert {c.id: c.text for c in engine.generate(other)} == {i: alone[i] for i in "cd"}
        assert len(engine.score(["The quick brown fox"])) == 1
        done = {}
        while not engine.idle:
            done |= {e.id: e.text for e in engine.step() if isinstance(e, Completion)}
        assert done == {i: alone[i] for i in "ab"}

        streams = {i: engine.stream(requests_of(i, 30)) for i in "abc"}
        texts = dict.fromkeys("abc", "")
        while streams:
            for i, stream in list(streams.items()):
                event = next(stream, None)
                if event is None:
                    del streams[i]
                elif not isinstance(event, Completion):
                    assert event.id == i
                    texts[i] += event.text
                if i == "c":
                    stream.close()  # leaving one stops its own request only
                    streams.pop(i, None)
        assert texts["a"] == alone["a"] and texts["b"] == alone["b"] and engine.idle


def test_an_id_in_use_is_refused(open_tiny):
    with open_tiny(bits=4) as engine:
        engine.submit(pwjax.Request(0, "The quick", None, FOUR))
        for call in (
            lambda: engine.submit(pwjax.Request("0", "The", None, FOUR)),
            lambda: engine.generate("The"),
            lambda: list(engine.stream("The")),
        ):
            with pytest.raises(pwjax.PromptError, match="a request with the id '?0'? already"):
                call()
        (completion,) = [e for e in run_out(engine) if isinstance(e, Completion)]
        assert completion.id == 0 and completion.generated_tokens == 4
        assert len(engine.generate("The quick", FOUR)) == 1


def run_out(engine):
    while not engine.idle:
        yield from engine.step()


def test_what_is_cancelled_in_a_call_is_named(open_tiny):
    with open_tiny(bits=4) as engine:
        end = engine.on_boundary(lambda boundary: engine.cancel() if boundary.index == 3 else None)
        with pytest.raises(pwjax.PWJaxError, match="id 'a' was cancelled before it had ended"):
            engine.generate(requests_of("a", 60))
        end()
        engine.on_boundary(lambda boundary: engine.close())
        with pytest.raises(pwjax.PWJaxError, match="cancelled|closed"):
            engine.generate(requests_of("a", 60))
        with pytest.raises(pwjax.PWJaxError, match="closed"):
            engine.submit(requests_of("b", 4)[0])


@pytest.mark.parametrize("phase", [*PHASES])
def test_ctrl_c_leaves_a_step_whole(open_tiny, phase):
    with open_tiny(bits=4) as engine:
        expected = {c.id: c.text for c in engine.generate(requests_of("ab", 40))}
        before = signal.getsignal(signal.SIGINT)
        turns = []

        def press(boundary):
            if boundary.phase == phase:
                turns.append(boundary.index)
                if len(turns) % 3 == 0:
                    signal.raise_signal(signal.SIGINT)

        engine.on_boundary(press)
        for request in requests_of("ab", 40):
            engine.submit(request)
        done, interrupts = {}, 0
        while not engine.idle:
            try:
                done |= {e.id: e.text for e in engine.step() if isinstance(e, Completion)}
            except KeyboardInterrupt:
                interrupts += 1
        assert done == expected and interrupts > 2 and signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            for _ in range(6):
                engine.generate("The quick", pwjax.SamplingParams(max_tokens=40, ignore_eos=True))
        engine.cancel()
        engine.parts.pager.check_invariants()
        engine.parts.kv.check_invariants()


def test_a_closed_engine_says_so(open_tiny):
    engine = open_tiny()
    engine.close()
    engine.close()
    device = (engine.parts.params, engine.parts.arena.array, engine.parts.page_table.table, engine.parts.kv.table)
    assert all(array.is_deleted() for array in jax.tree.leaves(device))
    for use in (lambda: engine.generate("x", FOUR), engine.step, engine.settle, lambda: list(engine.stream("x"))):
        with pytest.raises(pwjax.PWJaxError, match="the engine is closed"):
            use()
    assert engine.stats()["precision"]["epochs"] >= 1


def test_a_stream_whose_engine_is_closed_says_so(open_tiny):
    engine = open_tiny()
    stream = engine.stream(["The quick", "brown fox"])
    next(stream)
    engine.close()
    with pytest.raises(pwjax.PWJaxError, match="the engine is closed"):
        list(stream)


def test_one_request_can_be_cancelled_by_its_name(open_tiny):
    with open_tiny() as engine:
        for name in ("nope", "n"):
            engine.submit(pwjax.Request(name, "The quick"))
        engine.step()
        assert [c.id for c in engine.cancel("nope")] == ["nope"] and not engine.idle


def test_an_old_plan_changes_only_its_own_blocks(open_tiny, tmp_path):
    log = tmp_path / "log.jsonl"
    with open_tiny(log=log) as engine:
        engine.freeze()
        start = engine.parts.pager.committed
        old = pwjax.plan(engine.observe(), target_bytes=10 * engine.parts.memory.page_bytes)
        newer = pwjax.plan(engine.observe(), target_bytes=30 * engine.parts.memory.page_bytes)
        for plan in (newer, old):
            engine.apply(plan)
            engine.settle()
        moved = newer.bits != start
        assert np.array_equal(engine.parts.pager.committed[moved], newer.bits[moved])
        # A static plan moves nothing by itself: all of its bits are asked for.
        engine.apply(uniform(engine.parts.table, 3))
        engine.settle()
        assert set(engine.parts.pager.committed) == {3}
    plans = [r for r in map(json.loads, log.read_text().splitlines()) if r["kind"] == "apply"]
    stale = sum(bool(moved[change.block]) for change in old.changes())
    assert stale > 0
    asked = [len(newer.changes()), len(old.changes()) - stale, engine.parts.table.blocks]
    assert [len(p["changes"]) for p in plans] == asked
    assert [p["stale"] for p in plans] == [0, stale, 0]


def test_what_is_no_plan_and_no_callback_is_named(engine):
    table = engine.parts.table
    for wrong in (None, 3, np.full(table.blocks, 3)):
        with pytest.raises(UsageError, match="apply takes a plan, as pwjax.plan"):
            engine.apply(wrong)
    with pytest.raises(UsageError, match="on_boundary takes a function of a boundary, got 5"):
        engine.on_boundary(5)
    with pytest.raises(UsageError, match=f"a model with .* blocks; this one has {table.blocks}"):
        engine.apply(uniform(open_model(None).table(), 3))
    plan = uniform(table, 3)
    for block in (-1, table.blocks):
        with pytest.raises(ValueError, match=f"there is no block {block}; blocks are 0 to {table.blocks - 1}"):
            plan.explain(block=block)


def test_callbacks_come_in_one_order_and_may_apply_plans(engine):
    engine.freeze()
    seen, plan = [], uniform(engine.parts.table, 4)

    def callback(boundary):
        seen.append((boundary.index, boundary.phase))
        if boundary.phase == "pressure" and boundary.snapshot.observation.bits.max() > 4:
            engine.apply(plan)
        if boundary.phase == "retire" and boundary.report.committed:
            assert all(commit.to_bits == 4 for commit in boundary.report.committed)

    end = engine.on_boundary(callback)
    engine.generate("The quick", FOUR)
    engine.settle()
    assert [phase for _, phase in seen] == [*PHASES] * (len(seen) // 6) and seen[0][0] + 1 == seen[6][0]
    assert set(engine.parts.pager.committed) == {4}
    end()
    count = len(seen)
    with pytest.raises(pwjax.PWJaxError, match="callback cannot step"):
        end = engine.on_boundary(lambda boundary: engine.step())
        engine.generate("The quick", FOUR)
    end()
    engine.cancel()
    assert engine.generate("The quick", FOUR)[0].generated_tokens == 4 and len(seen) == count


@pytest.mark.parametrize("budget", ["900TiB", "99999999TiB"])
def test_a_budget_that_no_machine_has_is_refused(tiny_artifact, budget):
    with pytest.raises(pwjax.errors.BudgetError, match=r"comes to .* but the device .* has .*GiB"):
        pwjax.load(tiny_artifact, budget, batch=4, context=128)


@pytest.mark.parametrize("option", [{"batch": 1.5}, {"context": "64"}, {"chunks": ()}, {"chunks": (0,)}])
def test_sizes_are_whole_numbers(tiny_artifact, option):
    with pytest.raises(pwjax.errors.UsageError, match="must be a whole number|must be sizes in tokens"):
        pwjax.load(tiny_artifact, **option)

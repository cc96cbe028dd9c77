"""A logged run is repeated record by record; what differs, or comes from elsewhere, is named."""

import gc
import itertools
import json
import threading

import jax
import numpy as np
import pytest
from prompts import PROMPTS

import pwjax
from planner.solve import demote, uniform
from pwjax.cli import main
from pwjax.engine.log import read_log
from pwjax.engine.replay import HeaderMismatch, LogCheck, ReplayDifference, replay
from pwjax.errors import PWJaxError, UsageError
from pwjax.loading import Injected
from pwjax.memory.faults import Fate, FaultyTransfer

LONG = pwjax.SamplingParams(max_tokens=127, ignore_eos=True)


@pytest.fixture(scope="module")
def logged(open_tiny, tmp_path_factory):
    """A run with demotions, promotions, a cancellation, a plan by hand, failed and reordered copies."""
    log = tmp_path_factory.mktemp("replay") / "log.jsonl"
    rng, loaded, count = np.random.default_rng(1), [], itertools.count()

    def fate(job):
        if not loaded:
            return Fate()
        return Fate("fail" if next(count) % 4 == 0 else "ok", int(rng.integers(4)))

    injected = Injected(transfer=lambda store: FaultyTransfer(store, fate))
    with open_tiny(log=log, injected=injected) as engine:
        loaded.append(True)
        for i in range(5):
            sampling = LONG.with_fields(temperature=0.8) if i % 2 else LONG
            engine.submit(pwjax.Request(i, None, tuple(range(1 + i, 91 + i)), sampling))
        engine.submit(pwjax.Request("refused", None, (1,) * 300, LONG))
        for _ in range(2):
            engine.step()
        engine.cancel([1])
        engine.submit(pwjax.Request("late", PROMPTS[5], None, LONG.with_fields(stop=("q",), logprobs=1)))
        while not engine.idle:
            engine.step()
        engine.apply(pwjax.plan(engine.observe(), target_bytes=5 * 256))
        engine.settle()
        engine.freeze()
        engine.generate(PROMPTS[:2], LONG.with_fields(max_tokens=8))
        assert engine.stats()["transfers"]["failed"] > 0
    return log


def records_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_run_is_repeated_token_by_token(logged, capsys):
    kinds = {r["kind"] for r in records_of(logged)}
    assert kinds - {"evict"} == {
        "header", "submit", "refuse", "admit", "plan", "transfers", "commit", "boundary", "cancel", "apply", "settle",
        "freeze", "finish", "end",
    }  # fmt: skip
    assert main(["replay", str(logged), "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    finished = [r for r in records_of(logged) if r["kind"] == "finish"]
    assert result["equal"] and result["complete"] and result["requests"] == len(finished) == 8
    assert result["tokens"] == sum(len(r["token_ids"]) for r in finished) > 200


@pytest.mark.slow
def test_preemptions_are_repeated(open_tiny, tmp_path):
    # Room for the lowest weights and one and a half sequences: four slots must take turns.
    with open_tiny(1 + 48 + 100, log=tmp_path / "log") as engine:
        engine.generate(PROMPTS[:5], LONG.with_fields(max_tokens=100, temperature=0.8))
        assert engine.stats()["scheduler"]["preemptions"] > 0
    result = replay(tmp_path / "log")
    assert result.complete and (result.requests, result.tokens) == (5, 500)


def test_the_log_says_what_it_moved_and_why(logged):
    records = records_of(logged)
    header, plans = records[0], {r["boundary"] for r in records if r["kind"] in ("plan", "apply")}
    commits = [r for r in records if r["kind"] == "commit"]
    bits = np.array(header["bits"])
    for commit in commits:
        for block, was, to, written, _, planned in commit["changes"]:
            assert bits[block] == was and written > 0 and planned in plans
            bits[block] = to
        assert commit["bytes"] == sum(c[3] for c in commit["changes"]) * header["memory"]["page_bytes"]
    turns = [r for r in records if r["kind"] == "boundary"]
    assert all(r["weights_pages"] + r["kv_pages"] + r["free_pages"] <= header["num_pages"] - 1 for r in turns)
    assert len(json.dumps(turns)) < 250 * len(turns)


@pytest.mark.parametrize("change", ["tokens", "limits"])
def test_the_first_difference_is_named(logged, change):
    records = records_of(logged)[1:]
    if change == "tokens":
        changed = next(r for r in records if r["kind"] == "finish" and len(r["token_ids"]) > 5)
        changed["token_ids"][5] += 1
        words = r"finish\) is not repeated: token_ids \[5\]"
    else:
        changed = next(r for r in records if r["kind"] == "boundary" and sum(r["decode"]) > 4)
        changed["decode"][0] += 1
        words = r"boundary\) is not repeated: decode \[0\]"
    check = LogCheck({}, records)
    with pytest.raises(ReplayDifference, match=f"boundary {changed['boundary']}, {words}"):
        for record in records_of(logged)[1:]:
            check.write(record)
    check.write({"kind": "anything"})  # the engine can close


@pytest.mark.slow
def test_a_killed_run_is_repeated_as_far_as_its_log_goes(logged, tmp_path):
    text = logged.read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[: len(text) // 2])
    result = replay(cut)
    assert not result.complete and 0 < result.boundaries


def test_another_header_is_refused_with_all_that_differs(logged, tmp_path, tiny_artifact):
    records = records_of(logged)
    records[0]["versions"]["numpy"] = "0.1"
    records[0]["device"] = "abacus"
    records[0]["model_path"] = "gone"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(HeaderMismatch) as caught:
        replay(other, tiny_artifact)
    assert "versions: numpy" in str(caught.value) and '"abacus" ->' in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["", "no json\n", "[1]\n", '{"kind": "plan"}\n', '{"kind": "header", "schema": 1}\n'])
def test_what_is_no_log_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_log(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_log(tmp_path / "missing")


def test_a_damaged_line_is_named_and_a_cut_one_ends_the_log(tmp_path):
    path = tmp_path / "x"
    head = '{"kind": "header", "schema": 3}\n'
    freeze = '{"kind": "freeze", "boundary": 1}\n'
    path.write_text(head + freeze + '{"kind": "fin')
    assert [r["kind"] for r in read_log(path)[1]] == ["freeze"]
    for damaged in ("damaged", "[]", "{}", '{"kind": "freeze"}', '{"kind": "freeze", "boundary": 1.0}'):
        path.write_text(f"{head}{damaged}\n{freeze}")
        with pytest.raises(PWJaxError, match="line 2"):
            list(read_log(path)[1])
    path.write_text(head + freeze + freeze.replace("1", "0"))
    with pytest.raises(PWJaxError, match="line 3"):
        list(read_log(path)[1])
    with pytest.raises(UsageError, match="lacks the settings"):
        replay(path)


@pytest.mark.parametrize("kind, field", [
    ("submit", "sampling"), ("submit", "prompt_token_ids"), ("submit", "boundary"), ("cancel", "ids"),
    ("apply", "changes"), ("plan", "changes"), ("plan", "boundary"), ("transfers", "landed"), ("transfers", "failed"),
    ("end", "boundary"), ("header", "settings"),
])  # fmt: skip
@pytest.mark.parametrize("value", [None, 5.5, "x"])
def test_a_record_without_what_its_kind_has_is_damage(logged, tmp_path, kind, field, value):
    records = records_of(logged)
    record = next(r for r in records if r["kind"] == kind)
    if value is None:
        del record[field]
    elif field == "boundary":
        record[field] = [value]
    elif field == "settings":
        record[field]["unknown"] = value
    else:
        record[field] = value if field != "changes" else [value]
    (tmp_path / "log").write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(PWJaxError, match="damaged|is not repeated|must"):
        replay(tmp_path / "log")


@pytest.mark.parametrize("name, value", [
    ("injected", None), ("policy", 3), ("damage_per_ms", "x"), ("batch", [1]),
])  # fmt: skip
def test_settings_that_no_run_has_are_damage(logged, tmp_path, name, value):
    records = records_of(logged)
    records[0]["settings"][name] = value
    (tmp_path / "log").write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(PWJaxError, match="damaged|must"):
        replay(tmp_path / "log")


@pytest.mark.parametrize("kind, change", [
    ("plan", [-1, 6, 3]), ("plan", [9999, 6, 3]), ("plan", [0, 6, 7]), ("plan", [0, 4, 3.5]), ("transfers", -1),
])  # fmt: skip
def test_blocks_and_widths_that_the_model_does_not_have_are_damage(logged, tmp_path, kind, change):
    records = records_of(logged)
    record = next(r for r in records if r["kind"] == kind)
    record["changes" if kind == "plan" else "landed"].append(change)
    (tmp_path / "log").write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(UsageError, match="damaged.*does not have"):
        replay(tmp_path / "log")


@pytest.mark.parametrize("after", [1, 13, 40])
def test_what_a_killed_run_cannot_have_said_is_not_called_equal(logged, tmp_path, after):
    """A record made up at the end of a log without an end: it must not be counted as repeated."""
    records = records_of(logged)
    records = records[: [r["kind"] for r in records].index("finish")][:after]
    last = records[-1].get("boundary", 0)
    for made_up in (
        {"kind": "finish", "id": "r0", "order": 1, "reason": "length", "token_ids": [1, 2, 3]},
        {"kind": "preempt", "id": 0},
    ):
        record = {**made_up, "boundary": last, "free_pages": 1, "kv_pages": 1}
        (tmp_path / "log").write_text("".join(json.dumps(r) + "\n" for r in [*records, record]))
        with pytest.raises(ReplayDifference, match="is not repeated|goes on with"):
            replay(tmp_path / "log")
    (tmp_path / "log").write_text("".join(json.dumps(r) + "\n" for r in records))
    done = replay(tmp_path / "log")
    assert not done.complete and done.requests == done.tokens == 0 and done.boundaries == last


def test_what_went_wrong_is_told_before_what_closing_says(logged, tmp_path, monkeypatch):
    def broken(engine, *_):
        raise PWJaxError("out of luck")

    monkeypatch.setattr("pwjax.engine.replay._run", broken)
    with pytest.raises(PWJaxError, match="out of luck"):
        replay(logged)


def test_a_replay_that_goes_on_past_the_end_differs():
    check = LogCheck({}, [{"kind": "freeze", "boundary": 1}, {"kind": "end", "boundary": 1}])
    check.write({"kind": "freeze", "boundary": 1})
    check.write({"kind": "end", "boundary": 1})
    with pytest.raises(ReplayDifference, match="goes on"):
        check.write({"kind": "plan", "boundary": 2})


def test_a_load_that_fails_late_leaves_nothing_behind(open_tiny, tmp_path, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("late")

    gc.collect()
    before = {id(a) for a in jax.live_arrays()}
    threads = threading.active_count()
    monkeypatch.setattr("pwjax.loading.KVPages", broken)
    with pytest.raises(RuntimeError, match="late"):
        open_tiny(log=tmp_path / "log")
    assert threading.active_count() == threads
    assert not [a.shape for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()]


def test_demotions_that_have_not_landed_are_taken_back_where_memory_is_ample(open_tiny, tmp_path):
    ticks, log = itertools.count(), tmp_path / "log"
    # On a clock where every look takes a millisecond the pace leaves most of a large plan in the queue.
    injected = Injected(clock=lambda: next(ticks) * 0.001)
    with open_tiny(700, log=log, injected=injected) as engine:
        table = engine.observe().table
        engine.apply(uniform(table, 4))
        engine.settle()
        before = engine.stats()["precision"]["promotions"]
        engine.submit(pwjax.Request("calm", PROMPTS[0], None, LONG.with_fields(max_tokens=110)))
        engine.step()
        engine.apply(demote(table, np.full(table.blocks, 4), 4))
        pager = engine.parts.pager
        assert pager.demoting
        while not engine.idle:
            engine.step()
        engine.settle()
        assert engine.stats()["precision"]["promotions"] > before
    plans = [r for r in records_of(log) if r["kind"] == "plan"]
    assert plans[0]["withdrawn"] and not plans[0]["changes"] and plans[1]["released_pages"] < 0
    assert replay(log).complete

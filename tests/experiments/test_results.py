"""How results are written, how documents get their tables, and the one command that runs everything."""

import json
import sys

import pytest

from experiments import results, tables
from experiments.all import run, summary
from experiments.parts import Part
from experiments.throughput import bursts, movement


def test_results_are_written_with_their_settings_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "--data", str(tmp_path), "--budgets", "3"])
    path = tmp_path / "deep" / "out.json"
    tables.write(path, settings={"windows": 2}, runs={"a": {"nll": [1.5, 2.25], "names": ["x", "y"]}})
    found = tables.read(path)
    assert found["runs"]["a"] == {"nll": [1.5, 2.25], "names": ["x", "y"]} and found["schema"] == tables.SCHEMA
    assert str(tmp_path) not in path.read_text() and f"--data {tmp_path.name}" in found["command"]
    assert "[ 1.5, 2.25 ]" in path.read_text()  # samples are a line, not a line each
    path.write_text(json.dumps({"schema": "something else"}))
    with pytest.raises(SystemExit, match="something else"):
        tables.read(path)


def test_intervals_in_words():
    found = {"difference": -0.5, "interval_95": [-0.75, 0.25]}
    assert tables.interval(found, 2) == "-0.50 [-0.75, +0.25]"
    assert tables.interval({"difference": 0.5, "interval_95": None}, 1) == "+0.5" and tables.interval(None) == "-"
    share = {"share": 0.685, "interval_95": [0.6, 0.75], "gap": {"interval_95": [-0.2, -0.1]}}
    assert tables.percent(share) == "68.5% [60.0%, 75.0%]"
    assert tables.percent({**share, "gap": {"interval_95": [-0.2, 0.01]}}) == "no clear gap"


def test_a_document_gets_its_tables(monkeypatch):
    monkeypatch.setattr(results, "table", lambda file, name: f"table {name} of {file}")
    place = "<!-- table a/b.json two words -->\n{}\n<!-- end -->\n"
    text = f"before\n{place}after\n```\n{place.format('as it is')}```\n{place}"
    once = results.filled(text.replace("{}", "old"))
    assert once == text.replace("{}", "table two words of a/b.json") and results.filled(once) == once


@pytest.mark.parametrize("path", results.documents(), ids=lambda path: path.name)
def test_documents_are_up_to_date(path):
    text = path.read_text("utf-8")
    assert results.filled(text) == text, "run python -m experiments.results"


def test_a_part_that_fails_is_told_and_the_next_one_runs(tmp_path):
    seen = []
    say = lambda text, status: ["-c", f"import sys; print({text!r}); sys.exit({status})"]  # noqa: E731
    bad = Part("bad", [say("all is lost", 3), say("never", 0)], lambda: "")
    unread = Part("unread", [say("fine", 0)], lambda: {}["missing"])
    good = Part("good", [say("one", 0), say("two", 0)], lambda: "it works")
    out = Part("out", [say("never", 0)], lambda: "", lacks="needs weights")
    outcomes = [run(part, tmp_path, seen.append) for part in (bad, unread, good, out)]
    assert [o.state for o in outcomes] == ["failed", "failed", "done", "left out"]
    assert "all is lost" in outcomes[0].found and "3" in outcomes[0].found
    assert seen == ["all is lost", "fine", "one", "two"]
    assert (tmp_path / "good.log").read_text() == "one\ntwo\n"
    assert "| good | done |" in summary(outcomes) and "needs weights" in summary(outcomes)


def test_percentiles_and_rates_of_bursts():
    # A request lasts nine times its number in milliseconds; they begin one after the other, with pauses in between.
    requests = [{"arrival_s": float(i), "ttft_ms": float(i), "tpot_ms": 2.0 * i, "tokens": 5} for i in range(101)]
    assert bursts.busy_s(requests) == pytest.approx(9e-3 * sum(range(101)))
    together = [{**request, "arrival_s": 0.0} for request in requests]
    assert bursts.busy_s(together) == pytest.approx(0.9)
    arm = {"requests": together, "preemptions": 7,
           "precision": {"mean_bits_start": 8.0, "mean_bits_min": 3.5}}  # fmt: skip
    found = bursts.summary({"default": arm})
    assert found["default"]["ttft_ms"] == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert found["default"]["tokens_per_s"] == pytest.approx(505 / 0.9)
    row = bursts.shown(found)["bursts"].splitlines()[2]
    assert "| 561 |" in row and "100.0 / 180.0 / 198.0" in row and "8.00 -> 3.50" in row


def test_movement_is_held_against_its_limits():
    one = lambda live, share: {  # noqa: E731
        "live": {"tokens_per_s": live, "share": share, "copies_share": 0.002, "moves": 4, "pages": 8},
        "control": {"tokens_per_s": 100.0},
    }  # fmt: skip
    found = movement.summary([one(99.0, 0.01), one(99.2, 0.015), one(99.1, 0.01)])
    assert found["passed"] == {"rate": True, "share": True}
    assert found["decode_rate_ratio"]["mean"] == pytest.approx(0.991)
    found = movement.summary([one(99.0, 0.01), one(90.0, 0.03)])
    assert found["passed"] == {"rate": False, "share": False} and "not shown" in movement.shown(found)["movement"]

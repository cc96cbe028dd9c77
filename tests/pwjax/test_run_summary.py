"""A run's log as timeline, heat map, JSON and pictures."""

import json

import numpy as np
import pytest

from pwjax import cli
from pwjax.engine.log import LOG_SCHEMA
from pwjax.run_summary import sparkline, summarize_log

HEADER = {"kind": "header", "schema": LOG_SCHEMA, "policy": "default", "layers": 2, "experts": 3, "bits": [6] * 12}


def turn(boundary, mean_bits, kv, free, weights):
    return {"kind": "boundary", "boundary": boundary, "free_pages": free, "kv_pages": kv, "mean_bits": mean_bits,
            "weights_pages": weights, "prefill": None, "decode": [4]}  # fmt: skip


RECORDS = [
    turn(1, 6.0, 10, 50, 100),
    {"kind": "plan", "boundary": 2, "changes": [[3, 6, 2]]},
    {"kind": "transfers", "boundary": 3, "landed": [3], "failed": [[4, "cut short"]]},
    {"kind": "commit", "boundary": 3, "changes": [[2, 6, 3, 1, 9, 2], [3, 6, 2, 1, 9, 2]], "mean_bits": 5.4},
    turn(3, 5.4, 40, 38, 82),
    {"kind": "commit", "boundary": 9, "changes": [[2, 3, 16, 5, 1, 8]], "mean_bits": 6.5},
    turn(9, 6.5, 20, 30, 110),
    {"kind": "finish", "boundary": 9, "id": 1, "reason": "length"},
    *({"kind": "finish", "boundary": 9, "id": 3 + i, "reason": "cancelled"} for i in range(3)),
    {"kind": "finish", "boundary": 9, "id": 6, "reason": "refused"},
    {"kind": "refuse", "boundary": 9, "id": 7, "error": "too long"},
    {"kind": "preempt", "boundary": 9, "id": 2},
    {"kind": "end", "boundary": 9},
]


@pytest.fixture
def log(tmp_path):
    def write(records=RECORDS, header=HEADER):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in (header, *records)))
        return path

    return write


def run(capsys, *argv):
    code = cli.main(["inspect", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_bits_follow_the_commits_and_the_timeline_the_boundaries(log):
    summary = summarize_log(log())
    assert summary.boundary.tolist() == [1, 3, 9]
    assert summary.series["mean_bits"].tolist() == [6.0, 5.4, 6.5]
    assert summary.series["free_pages"].tolist() == [50, 38, 30]
    assert summary.bits[[1, 2, 3]].tolist() == [6, 16, 2] and summary.lowest[[1, 2, 3]].tolist() == [6, 3, 2]
    assert summary.heat(summary.bits)[0].tolist() == [6, 9, 6]
    assert summary.counts == {
        "finished requests": 1, "cancelled": 3, "refused": 2, "preemptions": 1, "plans": 1, "epochs": 2,
        "demotions": 2, "promotions": 1, "failed copies": 1,
    }  # fmt: skip


def test_text_and_json(capsys, log):
    code, out, _ = run(capsys, "--log", log())
    assert code == 0 and "boundaries 1 to 9" in out and "5.4 to 6.5, at the end 6.5" in out
    assert "bits at the end" in out and "    0 696" in out and "lowest bits" in out and "    0 626" in out
    code, out, _ = run(capsys, "--log", log(), "--json")
    found = json.loads(out)
    assert found["ranges"]["kv_pages"] == {"first": 10, "least": 10, "most": 40, "last": 20}
    assert found["bits"][2] == 16 and found["plots"] == []


def test_a_killed_run_is_summarized_as_far_as_it_goes(log):
    path = log(RECORDS[:1])
    with open(path, "a") as file:
        file.write('{"kind": "comm')
    assert summarize_log(path).bits.tolist() == [6] * 12
    assert "0 epochs" in summarize_log(log([])).render()


def test_pictures(capsys, log, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, "--log", log(), "--plot", tmp_path / "new" / "folder")
    assert code == 0 and out.count("wrote ") == 2
    for name in ("timeline.png", "bits.png"):
        assert (tmp_path / "new" / "folder" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--plot", "x"), "add --log"),
        (("--log", "x", "--verify"), "no --verify"),
        (("--log", "no/such/log"), "cannot read the log"),
    ],
)
def test_bad_use(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_damaged_logs_are_one_sentence(capsys, log):
    for records, header in (
        ([{"kind": "commit", "boundary": 1, "changes": [[99, 6, 3]]}], HEADER),
        ([{"kind": "boundary", "boundary": 1}], HEADER),
        ([], {**HEADER, "bits": [6]}),
    ):
        code, _, err = run(capsys, "--log", log(records, header))
        assert code == 1 and "is damaged" in err and err.count("\n") == 1


def test_a_sparkline_shows_when_things_changed():
    assert sparkline(np.array([0, 10]), np.array([1.0, 2.0])) == "▁█"
    assert sparkline(np.arange(200), np.repeat([1.0, 5.0, 3.0, 3.0], 50), columns=4) == "▁█▅▅"
    assert sparkline(np.array([5]), np.array([2.0])) == "█"


@pytest.mark.parametrize("change", [
    {"layers": 2.0}, {"layers": -2, "experts": -3}, {"bits": [6.0] * 12}, {"bits": [10**30] * 12}, {"bits": [[6] * 12]},
])  # fmt: skip
def test_a_header_that_no_run_has_is_damage(capsys, log, change):
    code, out, err = run(capsys, "--log", log(header={**HEADER, **change}))
    assert code == 1 and not out and "is damaged" in err and "internal" not in err


@pytest.mark.parametrize("record", [
    *({"kind": "commit", "boundary": 9, "changes": [change]} for change in ([-1, 6, 3], [12, 6, 3], [1, "6", "3"])),
    turn(9, float("nan"), 1, 1, 1), turn(9, 5.0, 10**400, 1, 1), turn(10**400, 5.0, 1, 1, 1),
    turn(float("inf"), 5.0, 1, 1, 1), HEADER,
])  # fmt: skip
def test_a_record_that_no_run_has_is_damage(capsys, log, record):
    code, out, err = run(capsys, "--log", log([*RECORDS, record]))
    assert code == 1 and not out and "damaged" in err and "internal" not in err and len(err) < 500

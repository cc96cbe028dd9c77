"""``pwjax bench``: every combination is a row, rates are those of the samples, and all three forms say the same."""

import csv
import io
import json
import statistics

import pytest

import pwjax.cli as cli
from pwjax.model_bench import as_csv, as_markdown

pytestmark = pytest.mark.usefixtures("quick_programs")


def run(capsys, *argv):
    code = cli.main(["bench", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_rows_and_forms(capsys, tiny_artifact):
    base = ("-m", tiny_artifact, "-p", 24, "-n", "4,8", "-r", 2, "--bits", "4,6", "-b", 2)
    code, out, err = run(capsys, *base, "-q", "-o", "json")
    assert code == 0 and err == ""
    result = json.loads(out)
    assert [(r["bits"], r["test"]) for r in result["rows"]] == [(b, t) for b in (4, 6) for t in ("pp24", "tg4", "tg8")]
    for row in result["rows"]:
        assert len(row["samples"]) == 2 and row["tokens_per_s"] == statistics.fmean(row["samples"]) > 0
        assert row["mean_bits"] == row["bits"] and row["batch"] == row["slots"] == 2 and row["policy"] == "fixed"
        assert row["peak_bytes"] <= row["budget_bytes"] and row["recompiles_after_warmup"] == 0
    assert {"versions", "cpu", "devices", "load_before"} <= set(result["environment"])
    rows = list(csv.DictReader(io.StringIO(as_csv(result["rows"]))))
    assert [r["test"] for r in rows] == ["pp24", "tg4", "tg8"] * 2 and float(rows[0]["tokens_per_s"]) > 0
    lines = as_markdown(result["rows"]).splitlines()
    assert len(lines) == 8 and lines[2].startswith("| tiny.pw | 4 | fixed |") and " ± " in lines[2]


def test_budgets_and_policies(capsys, tiny_artifact, budget_for):
    budget = budget_for(tiny_artifact, 290, batch=2, context=25)
    argv = ("-m", tiny_artifact, "-p", 24, "-n", 4, "-r", 1, "--memory-budget", budget, "--policy", "default,static")
    code, out, _ = run(capsys, *argv, "-b", 2, "-q", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [r["policy"] for r in rows] == ["default"] * 2 + ["static"] * 2
    assert all(int(r["budget_bytes"]) == budget and int(r["peak_bytes"]) <= budget for r in rows)
    assert rows[0]["stddev_tokens_per_s"] == ""


def test_bad_values(capsys, tiny_artifact):
    for argv, words in [
        (("--bits", 7), "this model has no 7 bits"), (("-p", "x"), "positive numbers with commas"),
        (("-p", 128), "need 129 tokens of context, but the model takes 128"), (("--policy", "nope"), "unknown policy"),
        (("--memory-budget", "1MB,x"), "x"),
    ]:  # fmt: skip
        code, out, err = run(capsys, "-m", tiny_artifact, "-n", 4, *(() if "-p" in argv else ("-p", 8)), *argv, "-q")
        assert code == 2 and out == "" and words in err and err.count("\n") == 1

"""The demo model that comes with the package: text under a budget, pressure, perplexity in the order of bits."""

import json
import subprocess
import sys

import pytest

import pwjax
from pwjax.cli import main
from pwjax.engine.budget import ProgramSizes
from pwjax.evaluate import heldout_documents, measure_perplexity

if not pwjax.bundled_model().is_dir():
    pytest.fail("the bundled model is missing from the package", pytrace=False)

PROMPTS = [
    "It was a dark night, and the old captain", "def __init__(self, name, value=None):\n", "The train left the",
    "class Reader:\n    def read(self", "Janet has 12 apples", "My dear friend,", "import os\nimport re\n", "In May",
]  # fmt: skip


def prints_text_and_a_summary(capsys, *options) -> None:
    assert main(["generate", "Once upon a time", "--memory-budget", "24MiB", "--max-tokens", "24", *options]) == 0
    captured = capsys.readouterr()
    words = captured.out.split()
    assert len(words) > 8 and sum(w.isalpha() for w in words) > len(words) / 2
    assert captured.err.splitlines()[-1].startswith("24 tokens in ") and "peak" in captured.err


def test_the_model_goes_on_with_a_text(capsys, monkeypatch, quick_programs):
    # Sizes of programs are not measured: that would compile them once more.
    monkeypatch.setattr("pwjax.loading.remembered_sizes", lambda *_: ProgramSizes(4 << 20, 1 << 20))
    prints_text_and_a_summary(capsys, "--batch", "1", "--context", "64")


@pytest.mark.slow
def test_the_first_command_prints_text_and_a_summary(capsys):
    prints_text_and_a_summary(capsys)


@pytest.mark.slow
def test_a_job_under_pressure_demotes_promotes_and_keeps_its_budget(tmp_path, monkeypatch):
    # The pager's pace lets nothing up for as long as a burst of demotions is paid for, by the clock of a machine that
    # may be busy: what it does is tested by itself.
    monkeypatch.setattr("pwjax.memory.pacing.Pace.take", lambda self, pages, urgent=False: True)
    # KV of the first eight does not fit beside the experts at 6 bits; that of the others leaves room again.
    lines = [
        {"id": i, "prompt": PROMPTS[i % 8] * 4, "max_tokens": 110 if i < 8 else 60, "ignore_eos": True}
        for i in range(28)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, stats_file, log = tmp_path / "out.jsonl", tmp_path / "stats.json", tmp_path / "log.jsonl"
    options = ["--prompts", source, "--output", out, "--memory-budget", "20MiB", "--context", 256, "--quiet"]
    assert main(["generate", *map(str, options), "--stats", str(stats_file), "--log", str(log)]) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["id"] for r in results) == list(range(28))
    assert {r["id"]: r["generated_tokens"] for r in results} == {line["id"]: line["max_tokens"] for line in lines}
    stats = json.loads(stats_file.read_text())
    memory, precision = stats["memory"], stats["precision"]
    assert memory["peak_bytes"] <= memory["budget_bytes"] == 20 * 2**20
    assert stats["compile"]["recompiles_after_warmup"] == 0
    assert precision["mean_bits_min"] < precision["mean_bits_start"]
    table = pwjax.Artifact.open(pwjax.bundled_model()).table()
    assert memory["pages_kv_peak"] + table.total_pages(6) > memory["pages_total"]
    records = map(json.loads, log.read_text().splitlines())
    changes = [change for r in records if r["kind"] == "commit" for change in r["changes"]]
    assert any(to < was for _, was, to, *_ in changes) and any(to > was for _, was, to, *_ in changes)


def perplexities(*widths, **options):
    return {bits: measure_perplexity(None, heldout_documents(), bits=bits, **options).perplexity for bits in widths}


@pytest.mark.slow
def test_perplexity_rises_as_bits_fall():
    found = perplexities(16, 6, 4, 3, window=512, max_tokens=16384)
    assert found[6] < found[4] < found[3]
    assert abs(found[6] / found[16] - 1) < 0.001


@pytest.mark.slow
def test_perplexity_rises_with_every_bit_less():
    # One bit in six costs a few hundredths of a per cent: it takes all of the text to see it.
    found = perplexities(6, 5, 4, 3, window=1024)
    assert found[6] < found[5] < found[4] < found[3]


RESIDENT = """
import json, os, sys, threading, time
import psutil
import pwjax

budget, process = 512 * 2**20, psutil.Process()
prompts = json.loads(sys.argv[1])
sampling = pwjax.SamplingParams(max_tokens=200, ignore_eos=True)

def job():
    with pwjax.load(None, budget, batch=8, context=1024) as engine:
        engine.generate(prompts, sampling)
        return engine.stats()["memory"]

with pwjax.load(None, 64 * 2**20, batch=8, context=1024) as engine:  # compiles everything, allocates little
    engine.generate(prompts, sampling)
before, peak, stop = process.memory_info().rss, 0, False

def watch():
    global peak
    while not stop:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
memory = job()
stop = True
thread.join()
print(json.dumps({"growth": peak - before, **memory}))
"""


@pytest.mark.slow
def test_resident_memory_confirms_the_budget():
    command = [sys.executable, "-c", RESIDENT, json.dumps(PROMPTS)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["peak_bytes"] <= found["budget_bytes"]
    assert found["growth"] <= 1.1 * found["budget_bytes"], found

"""``pwjax generate`` as scripts use it: outputs, resume after SIGKILL, bad input in one sentence."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pwjax.cli import main


@pytest.fixture(scope="module")
def shape(tiny_artifact, budget_for):
    """Options that ask for 290 pages, and the programs of most engines here."""
    return "--batch", "4", "--context", "128", "--memory-budget", str(budget_for(tiny_artifact, 290, batch=4))


@pytest.fixture
def run(tiny_artifact, shape, capsys):
    """Run ``pwjax generate`` on the tiny model in this process: ``(exit code, stdout, stderr)``."""

    def call(*arguments, bits=4, model=tiny_artifact):
        fixed = [] if bits is None else ["--bits", str(bits)]
        code = main(["generate", "--model", str(model), *shape, *fixed, *map(str, arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def jsonl(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path):
    return {r["id"]: r for r in map(json.loads, path.read_text().splitlines())}


def test_one_prompt_streams_text_and_ends_with_a_summary(run, tmp_path):
    code, out, err = run("The quick", "--max-tokens", 8, "--stats", tmp_path / "s.json", "--log", tmp_path / "l.jsonl")
    assert code == 0 and out.endswith("\n") and "tokens/s" in err and "mean bits 4.00" in err
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
    assert {"memory", "precision", "compile", "throughput", "transfers", "versions"} <= set(stats)
    code, quiet, err = run("The quick", "--max-tokens", 8, "--quiet")
    assert (code, quiet, err) == (0, out, "")
    code, text, _ = run("The quick", "--max-tokens", 8, "--json")
    record = json.loads(text)
    assert record["text"] + "\n" == out and record["generated_tokens"] == len(record["token_ids"])
    assert set(record) >= {"id", "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens"}


def test_a_job_reads_every_form_of_line(run, tmp_path):
    lines = ["def f", {"id": "a", "prompt": "12 +", "max_tokens": 3, "temperature": 1.0, "seed": 7, "logprobs": 2}]
    lines += [{"id": 9, "prompt_token_ids": [40, 41], "stop_token_ids": [1]}]
    lines += [{"id": "long", "prompt_token_ids": [5] * 200}]
    code, out, err = run("--prompts", jsonl(tmp_path / "in.jsonl", lines), "--json", "--max-tokens", 5)
    found = {r["id"]: r for r in map(json.loads, out.splitlines())}
    assert set(found) == {0, "a", 9, "long"}
    assert len(found["a"]["logprobs"]) == 3 and found["long"]["finish_reason"] == "refused"
    assert code == 2 and "200 tokens" in err.splitlines()[-1]


def test_a_finished_job_ends_as_it_did_and_takes_no_other_prompts(run, tmp_path):
    lines = ["def f", *({"prompt_token_ids": [5] * (200 + i)} for i in range(4))]
    options = ["--prompts", jsonl(tmp_path / "in.jsonl", lines), "--output", tmp_path / "o.jsonl", "--max-tokens", 2]
    first, again = run(*options), run(*options)
    assert first[0] == again[0] == 2 and first[2].splitlines()[-1] == again[2].splitlines()[-1]
    assert "200 tokens" in again[2] and "and 1 more" in again[2] and "nothing is left to do" in again[2]
    jsonl(tmp_path / "in.jsonl", ["a line more", *lines])
    code, _, err = run(*options)
    assert code == 2 and "for another prompt" in err and len(results(tmp_path / "o.jsonl")) == 5


def test_a_resumed_job_keeps_the_log_of_the_run_that_stopped(run, tmp_path):
    source, log = tmp_path / "in.jsonl", tmp_path / "log.jsonl"
    options = ["--prompts", source, "--output", tmp_path / "o.jsonl", "--log", log, "--max-tokens", 2]
    kept = []
    for lines in (["def f"], ["def f", "x"], ["def f", "x", "y"]):
        jsonl(source, lines)
        code, _, err = run(*options)
        assert code == 0 and [p.read_bytes() for p in sorted(tmp_path.glob("log.jsonl.*"))] == kept
        assert (f"is now {log}.{len(kept)}" in err) == bool(kept)
        kept.append(log.read_bytes())
    assert run(*options)[0] == 0 and log.read_bytes() == kept[-1], "nothing was left to do, so nothing was logged"


def test_killed_and_restarted_equals_uninterrupted(run, shape, tiny_artifact, tmp_path):
    prompts = [{"id": f"r{i}", "prompt": "lazy dog " * (1 + i % 3), "temperature": 0.8 * (i % 2)} for i in range(24)]
    source = jsonl(tmp_path / "in.jsonl", prompts)
    options = ["--prompts", str(source), "--max-tokens", "90", "--ignore-eos", "--seed", "3"]
    assert run(*options, "--output", tmp_path / "whole.jsonl")[0] == 0
    out = tmp_path / "out.jsonl"
    # -P: the folder that tests start in may hold the sources, without the kernels that an installed package has.
    command = [sys.executable, "-P", "-m", "pwjax", "generate", "--model", str(tiny_artifact), *shape, "--bits", "4"]
    process = subprocess.Popen([*command, *options, "--output", str(out)], stderr=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = out.read_text().count("\n")
    assert done < 24, "the job was over before it could be killed"
    with out.open("a") as file:
        file.write('{"id": "r23", "text": "torn')
    code, _, err = run(*options, "--output", out)
    assert code == 0 and f"resuming: {done} of 24" in err
    assert len(out.read_text().splitlines()) == 24
    assert results(out) == results(tmp_path / "whole.jsonl")
    code, _, err = run(*options, "--output", out, bits=5)
    assert code == 2 and "bits was 4, now 5" in err
    # A finished job has nothing left to do, and says nothing.
    assert run(*options, "--output", out, "--quiet") == (0, "", "")


def test_interrupt_keeps_what_is_finished(shape, tiny_artifact, tmp_path):
    lines = [{"id": i, "prompt": "na", "max_tokens": 2 + 100 * (i > 1)} for i in range(30)]
    source = jsonl(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-P", "-m", "pwjax", "generate", "--model", str(tiny_artifact), *shape, "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--prompts", str(source), "--output", str(out)], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err
    assert 2 <= len(results(out)) < 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one prompt"),
        (["a", "--prompts", "x"], "not both"),
        ([""], "empty"),
        (["a", "--output", "x"], "--prompts"),
        (["--prompts", "/nonexistent.jsonl"], "cannot read"),
        (["a", "--temperature", "nan"], "temperature"),
        (["a", "--temperature", "-1"], "temperature"),
        (["a", "--top-p", "1.5"], "top_p"),
        (["a", "--max-tokens", "0"], "max_tokens"),
        (["a", "--memory-budget", "10K"], "10KiB"),
        (["a", "--memory-budget", "1KiB"], "bytes"),
        (["a", "--stats", "/nonexistent/x.json"], "cannot write"),
        (["lazy dog " * 300], "shorten the prompt"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, words):
    code, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if not line.startswith("compiling")]
    assert code in (1, 2) and out == "" and len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]


def test_bad_lines_are_numbered_and_can_be_left_out(run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('"fine"\n{"prompt": \n{"id": 3, "prompt": "ok", "max_tokens": 2}\n')
    code, _, err = run("--prompts", path)
    assert code == 2 and "line 2" in err
    code, out, err = run("--prompts", path, "--skip-bad-lines", "--json", "--max-tokens", 2)
    assert code == 0 and len(out.splitlines()) == 2 and "skipped" in err
    path.write_text("\n")
    code, _, err = run("--prompts", path)
    assert code == 2 and "no request" in err


def test_a_model_that_is_not_there_or_not_quantized(run, tmp_path):
    code, _, err = run("a", model=tmp_path / "nothing")
    assert code == 1 and "nothing" in err
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run("a", model=tmp_path)
    assert code == 2 and "pwjax quantize" in err


def test_a_corrupted_page_is_named(run, tiny_artifact, tmp_path):
    import shutil

    copy = tmp_path / "copy.pw"
    shutil.copytree(tiny_artifact, copy)
    page_file = copy / "pages" / "layer_001.bin"
    data = bytearray(page_file.read_bytes())
    data[300] ^= 1
    page_file.write_bytes(data)
    code, _, err = run("a", model=copy)
    assert code == 1 and "layer_001.bin" in err and "page 1" in err


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_pages_that_break_during_a_job_cost_precision_moves_only(run, tiny_artifact, tmp_path, monkeypatch, damage):
    import shutil

    from pwjax.cli import generate

    copy = tmp_path / "copy.pw"
    shutil.copytree(tiny_artifact, copy)
    load = generate._load

    def load_and_damage(*arguments):
        engine = load(*arguments)
        for file in (copy / "pages").glob("*.bin"):
            data = file.read_bytes()
            file.write_bytes(data[:100] if damage == "truncate" else bytes(b ^ 1 for b in data))
        return engine

    monkeypatch.setattr(generate, "_load", load_and_damage)
    source = jsonl(tmp_path / "in.jsonl", [{"id": i, "prompt": "lazy dog"} for i in range(6)])
    options = ["--prompts", source, "--ignore-eos", "--max-tokens", 110, "--stats", tmp_path / "s.json", "--json"]
    # Of 290 pages, all blocks at 16 bits take 192, and four sequences of full length 256.
    code, out, err = run(*options, bits=None, model=copy)
    assert code == 0 and [json.loads(line)["generated_tokens"] for line in out.splitlines()] == [110] * 6
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["transfers"]["failed"] > 0 and "warning: " in err and "layer_00" in err
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
    told = [line for line in err.splitlines() if line.startswith("compiling")]
    assert len(told) == len(set(told))

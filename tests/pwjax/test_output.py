import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwjax.engine.output import ResultWriter, settings_hash
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.errors import PWJaxError, UsageError

SETTINGS = {"model": "abc", "bits": 4, "sampling": {"temperature": 0.0, "stop": ("x",)}}


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_appends_and_resumes(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, SETTINGS) as writer:
        assert writer.finished == set()
        writer.write({"id": 0, "text": "héllo\n😀"})
        assert records(path) == [{"id": 0, "text": "héllo\n😀"}]  # there before the writer is closed
        writer.write({"id": "a", "text": ""})
    with ResultWriter(path, SETTINGS) as writer:
        assert writer.finished == {"0", "a"}
        with pytest.raises(ValueError, match="already in"):
            writer.write({"id": "0"})
        writer.write({"id": 2, "text": "z"})
    assert [r["id"] for r in records(path)] == [0, "a", 2]
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["sha256"] == settings_hash(SETTINGS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.meta.json"]


def test_results_of_other_prompts_are_not_mixed_in(tmp_path):
    old = [Request(0, "a"), Request("x", None, (1, 2)), Request(2, "never run")]
    with ResultWriter(tmp_path / "o", SETTINGS) as writer:
        assert writer.left(old) == old
        writer.write({"id": 0, "prompt": "a", "prompt_tokens": 1, "finish_reason": "length"})
        refusal = {"finish_reason": "refused", "error": "too long"}
        writer.write({"id": "x", "prompt": None, "prompt_tokens": 2, **refusal})
    with ResultWriter(tmp_path / "o", SETTINGS) as writer:
        assert writer.refused == {"x": "too long"}
        assert writer.left(old) == old[2:] and writer.left(old[2:]) == old[2:]
        others = Request(0, "b"), Request(0, None, (1,)), Request("x", None, (1, 2, 3)), Request("x", "a")
        asked = Request(0, "a", sampling=SamplingParams(max_tokens=7)), Request(0, "a", min_bits=3)
        for changed in (*others, *asked):
            with pytest.raises(UsageError, match=f"a result '{changed.key}' for another prompt, or for one with other"):
                writer.left([old[2], changed])


def test_non_finite_numbers_become_null(tmp_path):
    with ResultWriter(tmp_path / "o", {}) as writer:
        writer.write({"id": 1, "logprobs": [float("-inf"), 0.5], "x": {"y": float("nan")}})
    assert records(tmp_path / "o") == [{"id": 1, "logprobs": [None, 0.5], "x": {"y": None}}]


@given(data=st.data())
def test_any_cut_keeps_whole_records_and_resumes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    texts = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=4))
    with ResultWriter(path, SETTINGS) as writer:
        for i, text in enumerate(texts):
            writer.write({"id": i, "text": text})
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    with ResultWriter(path, SETTINGS) as writer:
        assert writer.finished == {str(i) for i in range(whole[:cut].count(b"\n"))}
        for i, text in enumerate(texts):
            if str(i) not in writer.finished:
                writer.write({"id": i, "text": text})
    assert path.read_bytes() == whole


def test_a_last_line_of_zeros_is_dropped_but_damage_in_the_middle_is_not(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, SETTINGS) as writer:
        writer.write({"id": 1})
    good = path.read_bytes()
    path.write_bytes(good + b"\0\0\0\n")
    with ResultWriter(path, SETTINGS) as writer:
        assert writer.finished == {"1"}
    assert path.read_bytes() == good
    path.write_bytes(b"damage\n" + good)
    with pytest.raises(UsageError, match=r"out\.jsonl, line 1 is not a result"):
        ResultWriter(path, SETTINGS)
    assert path.read_bytes() == b"damage\n" + good


def test_other_settings_are_refused_and_named(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, SETTINGS) as writer:
        writer.write({"id": 1})
    before = path.read_bytes()
    other = {"model": "abc", "bits": 5, "sampling": {"temperature": 0.0, "stop": ["x"], "seed": 3}}
    with pytest.raises(UsageError) as caught:
        ResultWriter(path, other)
    message = str(caught.value)
    assert "bits was 4, now 5" in message and "sampling.seed was null, now 3" in message
    assert "model" not in message and "stop" not in message
    assert path.read_bytes() == before


def test_results_that_came_while_another_run_opened_the_file_are_kept_apart(tmp_path, monkeypatch):
    path, lock = tmp_path / "out.jsonl", ResultWriter._lock

    def late(self):
        monkeypatch.setattr(ResultWriter, "_lock", lock)
        with ResultWriter(path, SETTINGS) as first:
            first.write({"id": 1})
        lock(self)

    monkeypatch.setattr(ResultWriter, "_lock", late)
    with pytest.raises(UsageError, match="other settings"):
        ResultWriter(path, {**SETTINGS, "bits": 5})
    with ResultWriter(path, SETTINGS) as writer:
        assert writer.finished == {"1"}


def test_a_file_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(UsageError, match=r"exists and has no out\.jsonl\.meta\.json beside it"):
        ResultWriter(path, SETTINGS)
    (tmp_path / "out.jsonl.meta.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be resumed"):
        ResultWriter(path, SETTINGS)
    assert path.read_text() == '{"id": 1}\n'


def test_an_empty_file_or_a_sidecar_alone_is_no_obstacle(tmp_path):
    path = tmp_path / "out.jsonl"
    path.touch()
    ResultWriter(path, SETTINGS).close()
    with ResultWriter(path, {"bits": 3}) as writer:  # nothing was produced, so nothing can be mixed
        writer.write({"id": 1})
    with ResultWriter(path, {"bits": 3}) as writer:
        assert writer.finished == {"1"}


def test_unwritable_places_are_sentences(tmp_path):
    with pytest.raises(UsageError, match="is a directory or device"):
        ResultWriter(tmp_path, {})
    with pytest.raises(UsageError, match="cannot write the output .*: No such file"):
        ResultWriter(tmp_path / "none" / "out.jsonl", {})


def test_two_writers_at_once_are_refused(tmp_path):
    with ResultWriter(tmp_path / "o", SETTINGS) as writer:
        writer.write({"id": 1})
        with pytest.raises(UsageError, match="another run is writing"):
            ResultWriter(tmp_path / "o", SETTINGS)


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch, written):
    path = tmp_path / "out.jsonl"
    writer = ResultWriter(path, SETTINGS)
    writer.write({"id": 1})
    good = path.read_bytes()
    real = os.write
    calls = []

    def full(fd, data):
        calls.append(len(data))
        if len(calls) == 1 and written:
            return real(fd, data[:written])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PWJaxError, match="the disk is full. 1 result kept; free some space and run the same command"):
        writer.write({"id": 2, "text": "x" * 50})
    monkeypatch.undo()
    assert path.read_bytes() == good
    writer.write({"id": 2, "text": "y"})
    writer.close()
    assert [r["id"] for r in records(path)] == [1, 2]


def test_survives_sigkill(tmp_path):
    path = tmp_path / "out.jsonl"
    script = textwrap.dedent(f"""
        from pwjax.engine.output import ResultWriter
        writer = ResultWriter({str(path)!r}, {{"bits": 4}})
        i = len(writer.finished)
        while True:
            writer.write({{"id": i, "text": "x" * 1000}})
            print(i, flush=True)
            i += 1
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(5):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.communicate()
        with ResultWriter(path, {"bits": 4}) as writer:
            assert {str(i) for i in range(last + 1)} <= writer.finished
    ids = [r["id"] for r in records(path)]
    assert ids == list(range(len(ids))) and len(ids) >= 10

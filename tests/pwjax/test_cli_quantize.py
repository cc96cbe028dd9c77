"""``pwjax quantize``: the same bytes as from Python, after a kill too; and a sentence for everything that is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import save_hf
from pwjax.checkpoints.tree import param_shapes, unflatten
from pwjax.cli import main
from pwjax.quantization import quantize

pytestmark = pytest.mark.usefixtures("quick_programs")

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def hf(tmp_path_factory, tiny_config, tiny_params, tiny_tokenizer):
    return save_hf(tmp_path_factory.mktemp("quantize") / "hf", tiny_config, tiny_params, tiny_tokenizer)


def run(capsys, *argv):
    code = main(["quantize", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def test_same_bytes_as_from_python(tmp_path, capsys, hf, tiny_config, tiny_params):
    code, out, err = run(capsys, hf, tmp_path / "a.pw", "--bits", "3-5", "--lut-rows", 32, "--no-16bit", "--json")
    told = json.loads(out)
    assert code == 0 and told["bits"] == told["widths"] == [3, 4, 5] and not told["fallback"]
    assert told["lut_rows"] == {"gate_up": 32, "down": 32} and told["windows"] == 0 and told["few_tokens"] == []
    assert [(r["layer"], r["matrix"]) for r in told["report"]] == [(i, m) for i in (0, 1) for m in ("gate_up", "down")]
    for row in told["report"]:
        errors = [row["relative_error"][b] for b in "345"]
        assert 1 > errors[0] > errors[1] > errors[2] > 0
    made = contents(tmp_path / "a.pw")
    assert told["disk_bytes"] == sum(map(len, made.values())) - len(made["manifest.json"])
    assert "note: without --calibration" in err
    quantize(
        tiny_params, tiny_config, tmp_path / "b.pw", tokenizer=hf, bits="3-5", lut_rows=32, fallback=False, jobs=2
    )
    assert made == contents(tmp_path / "b.pw")
    assert made["tokenizer.json"] == (hf / "tokenizer.json").read_bytes()


def test_calibration_text(tmp_path, capsys, hf):
    for name, text in [("a.txt", "The quick brown fox. " * 40), ("b.txt", "def f(x): return x + 1\n" * 40)]:
        (tmp_path / name).write_text(text)
    texts = ["--calibration", tmp_path / "a.txt", "--calibration", tmp_path / "b.txt", "--weight", 3, "--weight", 1]
    code, out, err = run(
        capsys, hf, tmp_path / "out.pw", *texts, "--tokens", 64, "--sequence-length", 16, "--lut-rows", 32, "--jobs", 2
    )
    assert code == 0 and out == ""  # the report is for people: standard error
    assert "relative weighted error" in err and "2 bits" in err and "6 bits" in err and "note: without" not in err
    assert f"wrote {tmp_path / 'out.pw'}: experts at 2-6 and 16 bits" in err
    artifact = Artifact.open(tmp_path / "out.pw")
    facts = artifact.manifest["calibration"]
    assert facts["damage"][0] == facts["default"] == "directional" and {"output", "paper"} < set(facts["damage"])
    assert (facts["windows"], facts["window_tokens"], facts["points"]) == (4, 16, [6, 4])
    assert [(s["windows"], s["weight"]) for s in facts["texts"]] == [(3, 3.0), (1, 1.0)]
    assert "calibrating with 4 sequences of 16 tokens, chosen from" in err and "of memory and" in err
    for form in facts["damage"]:
        table = artifact.table(form)
        assert (np.diff(table.damage, axis=1) <= 0).all() and (table.damage[:, 0] > 0).all()
    assert artifact.verify() == []


def test_quiet_is_silent(tmp_path, capsys, hf):
    assert run(capsys, hf, tmp_path / "out.pw", "--bits", "4", "--lut-rows", 32, "--quiet") == (0, "", "")


def test_killed_run_goes_on_to_the_same_bytes(tmp_path, capsys, tiny_config, tiny_tokenizer):
    config, rng = replace(tiny_config, num_layers=12), np.random.default_rng(1)
    params = unflatten({n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in param_shapes(config).items()})
    save_hf(tmp_path / "hf", config, params, tiny_tokenizer)
    words = ["quantize", str(tmp_path / "hf"), str(tmp_path / "killed.pw"), "--jobs", "1"]
    child = subprocess.Popen([sys.executable, "-P", "-m", "pwjax", *words], env=ENV, stderr=subprocess.PIPE)
    state = tmp_path / "killed.pw.partial" / "state"
    deadline = time.monotonic() + 120
    while not (state / "layer_000.json").exists():
        assert child.poll() is None and time.monotonic() < deadline, child.stderr.read()
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL and not (tmp_path / "killed.pw").exists()
    kept = len(list(state.glob("layer_*.json")))
    assert 1 <= kept < 12

    code, _, err = run(capsys, tmp_path / "hf", tmp_path / "killed.pw", "--bits", "3-4")
    assert code == 1 and "holds a conversion of another model, text or settings" in err
    code, _, err = run(capsys, tmp_path / "hf", tmp_path / "killed.pw")
    assert code == 0 and f"resuming: {kept * 8} of 96 expert matrices are there" in err
    assert not (tmp_path / "killed.pw.partial").exists()
    assert run(capsys, tmp_path / "hf", tmp_path / "whole.pw", "--jobs", 2)[0] == 0
    assert contents(tmp_path / "killed.pw") == contents(tmp_path / "whole.pw")


def test_orbax_directory_with_a_config(tmp_path, capsys, hf, tiny_params):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": tiny_params, "step": np.int32(7)})
    words = ["--lut-rows", 32, "--config", hf / "config.json", "--tokenizer", hf]
    assert run(capsys, tmp_path / "run", tmp_path / "a.pw", *words)[0] == 0
    assert run(capsys, hf, tmp_path / "b.pw", "--lut-rows", 32)[0] == 0
    assert contents(tmp_path / "a.pw") == contents(tmp_path / "b.pw")


def test_bad_input(tmp_path, capsys, hf, tiny_artifact):
    out, text, bare = tmp_path / "out.pw", tmp_path / "text.txt", tmp_path / "bare"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    text.write_text("")
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((hf / name).read_bytes())

    def told(expected, *words):
        code, printed, err = run(capsys, *words, "--quiet")
        assert code == expected and printed == "" and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    assert "does not exist" in told(2, tmp_path / "none", out)
    assert "has no config.json; for an Orbax directory" in told(2, tmp_path / "full", out)
    assert "is quantized already" in told(1, tiny_artifact, out)
    assert "not an empty directory" in told(1, hf, tmp_path / "full")
    assert "not an empty directory" in told(1, hf, hf)
    assert "contiguous range within 2-8" in told(2, hf, out, "--bits", "1-4")
    assert "contiguous range within 2-8" in told(2, hf, out, "--bits", "2,4")
    assert "auto or a number" in told(2, hf, out, "--lut-rows", "few")
    assert "does not divide the 64 rows of gate_up" in told(2, hf, out, "--lut-rows", 5)
    assert "give --calibration TEXT_FILE as well" in told(2, hf, out, "--tokens", 4)
    assert "once for each --calibration" in told(2, hf, out, "--text", text, "--weight", 1, "--weight", 2)
    assert "does not exist" in told(2, hf, out, "--calibration", tmp_path / "no.txt")
    assert "is empty" in told(2, hf, out, "--calibration", text)
    assert "no tokenizer.json" in told(2, bare, out, "--calibration", text)
    assert "--jobs" in told(2, hf, out, "--jobs", 0)
    assert "OUT" in told(2, hf)
    (bare / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-100])
    assert "truncated" in told(1, bare, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "full", "text.txt"]


def test_disk_space_is_checked_first(tmp_path, capsys, hf, monkeypatch):
    class Usage:
        free = 1 << 20

    monkeypatch.setattr("pwjax.checkpoints.writer.shutil.disk_usage", lambda _: Usage)
    code, _, err = run(capsys, hf, tmp_path / "out.pw")
    assert code == 1 and "not enough disk space" in err and list(tmp_path.iterdir()) == []


def test_interrupted_exits_130(tmp_path, capsys, hf, monkeypatch):
    def interrupted(*_args, **_words):
        raise KeyboardInterrupt

    monkeypatch.setattr("pwjax.quantization.quantize", interrupted)
    code, _, err = run(capsys, hf, tmp_path / "out.pw", "--quiet")
    assert code == 130 and "the same command goes on" in err

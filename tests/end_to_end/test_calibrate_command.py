"""`pwjax calibrate` on a copy of the tiny model, from text to tables and report."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.cli import main
from pwjax.errors import UsageError


@pytest.fixture
def model(tiny_artifact, tmp_path) -> Path:
    (tmp_path / "prose.txt").write_text("The quick brown fox jumps over the lazy dog, and naïve café. " * 60)
    (tmp_path / "code.txt").write_text("def f(x):\n    return x + 1\n12 + 30 = 42\n" * 80)
    (tmp_path / "held.txt").write_text("A lazy fox returns 12 + 1 quick dogs.\nThe café jumps over f(x).\n" * 40)
    return Path(shutil.copytree(tiny_artifact, tmp_path / "tiny.pw"))


def digests(folder: Path) -> dict:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def run(model, *arguments) -> int:
    folder = model.parent
    return main(
        ["calibrate", str(model), "--report", str(folder / "r" / "report.json"), "--quiet", *map(str, arguments)]
    )


def interrupt(*_arguments, **_settings):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_calibrate_replaces_tables_checks_them_and_is_repeatable(model, tmp_path, monkeypatch):
    work = model.with_name("tiny.pw.calibrating")
    texts = ["--text", tmp_path / "prose.txt", "--text", tmp_path / "code.txt", "--heldout", tmp_path / "held.txt"]
    sizes = ["--tokens", 768, "--sequence-length", 32, "--changes", 12, "--plans", 8, "--heldout-tokens", 256]
    before = digests(model)
    # Interrupted while it is checked: the calibration stays and is not done again.
    monkeypatch.setattr("pwjax.evaluate.truth.check_truth", interrupt)
    assert run(model, *texts, *sizes) == 130 and work.is_dir()
    monkeypatch.undo()
    monkeypatch.setattr("calib.stream._backward", interrupt)
    assert run(model, *texts, *sizes) == 0 and not work.exists()
    monkeypatch.undo()
    after = digests(model)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {"manifest.json", "calibration/tables.safetensors"} and not Artifact.open(model).verify()
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    facts = Artifact.open(model).manifest["calibration"]
    assert {"output", "directional", "paper"} <= set(report["forms"]) and facts["default"] == report["default"]
    assert report["default"] == report["truth"]["best"] and report["residual"]["held_out"] > 0
    assert all(np.isfinite(Artifact.open(model).table(form).expected).all() for form in report["forms"])
    page = (tmp_path / "r" / "report.md").read_text()
    assert "## Prompt residual" in page and f"**{report['default']}**" in page

    # Nothing is measured again, and equal inputs give equal bytes.
    first = (tmp_path / "r" / "report.json").read_bytes()
    assert run(model, *texts, *sizes) == 0
    assert digests(model) == after and (tmp_path / "r" / "report.json").read_bytes() == first
    assert run(model, "--check-only", *texts[4:], *sizes[4:]) == 0
    assert digests(model) == after


def test_check_only_takes_no_calibration_text(model, tmp_path, capsys):
    assert run(model, "--check-only", "--text", tmp_path / "prose.txt") == 2
    assert "--check-only keeps the tables" in capsys.readouterr().err


def test_what_cannot_be_calibrated_is_told_in_a_sentence(model, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("  \n")
    texts = ["--text", tmp_path / "prose.txt", "--heldout", tmp_path / "empty.txt"]
    assert run(tmp_path / "nothing.pw", *texts) == 1
    assert "there is no quantized model" in capsys.readouterr().err
    assert run(model, "--check-only", "--heldout", tmp_path / "empty.txt") == 2
    assert "empty.txt holds no text" in capsys.readouterr().err


def test_memory_and_disk_are_told_before_anything_is_done(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pwjax.calibration._bind", interrupt)
    texts = ["--text", str(tmp_path / "prose.txt"), "--tokens", "64", "--sequence-length", "32"]
    assert main(["calibrate", str(model), "--no-truth", *texts]) == 130
    assert re.search(r"at most [\d.]+ \w+ of memory and [\d.]+ \w+ of disk", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--no-truth"], ["--heldout", "held.txt", "--changes", "3", "--plans", "3"]])
def test_a_python_without_sources_is_no_hindrance_where_texts_are_given(model, tmp_path, monkeypatch, arguments):
    def missing():
        raise UsageError("Python comes without the sources of its standard library")

    monkeypatch.setattr("pwjax.evaluate.heldout_documents", missing)
    monkeypatch.setattr("pwjax.evaluate.truth.check_truth", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    assert run(model, "--check-only", *arguments) == 0
    assert run(model, "--check-only") == 2

"""Budgets of equal peak bytes, ladders of one geometry, and runs that are kept."""

import argparse

import pytest

from experiments.arms import Runs, bits_at, budget_at, expert_pages, options
from experiments.paired import Arm
from experiments.quality_memory.ladder import name_of, requantized
from pwjax.checkpoints.artifact import Artifact

# The tiny model: 48 pages at 2 bits, 120 at 6.


@pytest.fixture
def tiny(tiny_artifact) -> Artifact:
    return Artifact.open(tiny_artifact)


def test_pages_and_bits_are_each_others_inverse(tiny):
    three, four = (tiny.table().total_pages(b) for b in (3, 4))
    assert expert_pages(tiny, 3) == three and expert_pages(tiny, 3.5) == (three + four) / 2
    assert bits_at(tiny, three) == 3 and bits_at(tiny, (three + four) / 2) == pytest.approx(3.5)


def test_a_budget_grows_by_the_pages_of_the_experts(tiny):
    budgets = [budget_at(tiny, bits, 32, 2) for bits in (2, 3, 4)]
    pages = [tiny.table().total_pages(bits) for bits in (2, 3, 4)]
    page_bytes = tiny.geometry.page_bytes
    assert [b - budgets[0] for b in budgets] == [(p - pages[0]) * page_bytes for p in pages]


def test_another_ladder_has_the_same_bytes_at_the_same_width(tiny, tmp_path, quick_programs):
    args = argparse.Namespace(data=None, text=[], tokens=64)
    path = requantized(tiny, "3-6", tmp_path / "other.pw", args)
    other = Artifact.open(path)
    assert (name_of(tiny), name_of(other)) == ("2-6", "3-6")
    assert other.geometry.page_bytes == tiny.geometry.page_bytes
    assert [other.table().total_pages(b) for b in (3, 4, 5, 6, 16)] == [
        tiny.table().total_pages(b) for b in (3, 4, 5, 6, 16)
    ]
    before = path.stat().st_mtime_ns
    assert requantized(tiny, "3-6", path, args) == path and path.stat().st_mtime_ns == before


def test_runs_are_measured_once_and_kept(tiny, tmp_path, monkeypatch, quick_programs):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    flags = ["--windows", "2", "--window", "32", "--sequences", "2", "--text", f"fox={text}"]
    args = options("Doc.", str(tmp_path / "out.json")).parse_args(flags)
    runs = Runs(args, {"2-6": tiny.path})
    found = runs.of(Arm("default"), 3.0, "fox")
    assert len(found["nll"]) == len(found["tokens"]) == 2 and found["peak_bytes"] <= found["budget_bytes"]
    whole = runs.of(Arm(bits=16), None, "fox")
    assert min(found["kl"]) > 0 and whole["kl"] == [0, 0]
    refused = runs.of(Arm(bits=6), 2.0, "fox")
    assert "too small" in refused["refused"]
    assert runs.peak_share == found["peak_bytes"] / found["budget_bytes"] <= 1

    monkeypatch.setattr("experiments.arms.measure_perplexity", lambda *a, **k: pytest.fail("measured again"))
    again = Runs(args, {"2-6": tiny.path})
    assert again.of(Arm("default"), 3.0, "fox") == found and again.of(Arm(bits=6), 2.0, "fox") == refused
    text.write_text("Another text, long enough for a window or two of it. " * 40)
    with pytest.raises(SystemExit, match="other settings"):
        Runs(args, {"2-6": tiny.path})

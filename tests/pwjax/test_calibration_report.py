import json
from dataclasses import replace

import numpy as np
import pytest

from pwjax import calibration_report
from pwjax.checkpoints.artifact import Artifact
from pwjax.evaluate import Document, truth


@pytest.fixture
def documents():
    return [Document("a/prose.txt", "The quick brown fox jumps. " * 60), Document("code.py", "x = x + 1\n" * 120)]


@pytest.fixture
def measured(monkeypatch, tiny_artifact):
    """A stand-in for the model: a plan loses three times its damage. Lists what it is asked."""
    asked = []

    class Loss:
        def __init__(self, artifact, windows):
            self.table, self.scale = artifact.table(), 3 * np.linspace(0.9, 1.1, len(windows))

        def measure(self, bits):
            asked.append(bits)
            return self.table.total_damage(bits) * self.scale

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

    monkeypatch.setattr(truth, "Divergence", Loss)
    return asked


def check(artifact, documents, path=None, tables=None, **settings):
    tables = tables or calibration_report.forms(artifact)
    small = dict(changes=20, plans=12, mean_bits=(3, 3.5), heldout_tokens=128, window=16) | settings
    return truth.check_truth(artifact, tables, documents, measurements=path, **small)


def test_a_true_table_is_found_true_and_the_report_says_so(tiny_artifact, documents, measured, tmp_path):
    artifact = Artifact.open(tiny_artifact)
    form = artifact.manifest["calibration"]["damage"][0]
    found = check(artifact, documents, tmp_path / "m.jsonl")
    for part in (found["changes"], *found["mixed"].values()):
        assert part["forms"][form]["spearman"] == pytest.approx(1)
        assert part["forms"][form]["slope_origin"] == pytest.approx(3)
        assert part["spearman_ceiling"] == pytest.approx(1)
    assert list(found["mixed"]) == ["3", "3.5"] and found["mixed"]["3"]["forms"]["bytes only"]["spearman"] is None
    assert found["best"] == form and found["median_spearman"][form] == pytest.approx(1)
    assert found["super_additivity"]["3"][form] == pytest.approx(1)
    assert set(found["planned"]["3"]["even"]["by_text"]) == {"prose.txt", "code.py"}

    report = calibration_report.build(artifact, found)
    files = calibration_report.write(report, tmp_path / "out" / "report.json")
    assert calibration_report.read(files[0]) == json.loads(json.dumps(report))
    text = files[1].read_text()
    assert "NaN" not in files[0].read_text() and str(tmp_path) not in files[0].read_text() + text
    for section in ("## Damage layer by layer", "## Blocks that decide", "## Truth check", "## Text by text"):
        assert section in text
    assert report["decisive"]["blocks"][0]["block"] in text
    for name in files[2:]:
        assert f"({name.name})" in text and name.stat().st_size > 5000


def test_a_form_of_routed_tokens_is_checked_as_its_twin_of_served_ones(tiny_artifact, documents, measured):
    artifact = Artifact.open(tiny_artifact)
    table = artifact.table()
    # Powers of two, so that dividing by them and multiplying again is exact.
    rate = 2.0 ** np.random.default_rng(1).integers(-2, 3, table.routing_mass.shape)
    served = replace(table, routing_rate=rate, conditional=False, kinds=None)
    routed = replace(served, damage=served.damage / rate.repeat(2)[:, None], conditional=True)
    found, plans = [], []
    for pair in ((served, served), (served, routed), (routed, served), (routed, routed)):
        found.append(check(artifact, documents, tables=dict(zip(("one", "two"), pair, strict=True))))
        plans.append(np.array(measured))
        measured.clear()
    assert all((p.shape == plans[0].shape and (p == plans[0]).all()) for p in plans) and len(plans[0]) > 40
    assert all(f == found[0] for f in found)
    for level in found[0]["planned"].values():
        assert level["one"] == level["two"]


def test_a_stopped_check_goes_on_and_gives_the_same(tiny_artifact, documents, measured, tmp_path):
    artifact = Artifact.open(tiny_artifact)
    whole = check(artifact, documents, tmp_path / "whole.jsonl")
    count = len(measured)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[: count // 2]))
    measured.clear()
    assert check(artifact, documents, tmp_path / "part.jsonl") == whole
    assert len(measured) == count - (count // 2 - 1)


def test_a_report_without_truth_or_matplotlib_says_so(tiny_artifact, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    report = calibration_report.build(Artifact.open(tiny_artifact))
    files = calibration_report.write(report, tmp_path / "report.json")
    text = files[1].read_text()
    assert len(files) == 2 and "pwjax[plot]" in text and "Not run" in text

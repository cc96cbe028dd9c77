"""Samples of runs: paired differences, shares of a gap, and what the tables of quality and layers say of them."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.ablation import plot as ablation_plot
from experiments.ablation import run as ablation
from experiments.domain_shift import plot as shift_plot
from experiments.domain_shift import run as shift
from experiments.paired import Arm, Samples, clear
from experiments.quality_memory import changes
from experiments.quality_memory import plot as quality_plot
from experiments.quality_memory import run as quality
from pwjax.evaluate.comparison import paired_difference

TOKENS = [10, 20, 30, 40]
DEFAULT, RANDOM = Arm("default"), Arm("random", draws=2)


def samples(**nats: float) -> Samples:
    """Runs of arms whose every token costs so many nats, plus the noise of the window, on two texts; a tenth of that
    is their divergence."""
    runs = Samples({}, ["prose", "code"], ["2-6"])
    noise = np.array([0.1, -0.1, 0.2, 0.05])
    for name, value in nats.items():
        arm = Arm(bits=int(name[1:])) if name[0] == "b" else Arm(name.replace("_", "-"))
        for budget in (None, 3.0, 3.5, 4.0, 5.0):
            for text in runs.names:
                own = (value + noise + (text == "code")) * TOKENS
                runs.runs[runs.key(arm, budget, text)] = {
                    "nll": own.tolist(), "kl": (own / 10).tolist(), "tokens": TOKENS
                }  # fmt: skip
    return runs


def test_a_difference_is_paired_over_all_windows():
    runs = samples(default=2.0, paper=2.5)
    found = runs.difference(DEFAULT, Arm("paper"), 3.0)
    first, second = (runs.pooled(arm, 3.0) for arm in (DEFAULT, Arm("paper")))
    assert found == paired_difference(first["nll"], second["nll"], np.array(TOKENS * 2), 0)
    assert found["difference"] == pytest.approx(-0.5) and clear(found)
    assert not clear(runs.difference(Arm("paper"), DEFAULT, 3.0))
    assert runs.mean(DEFAULT, 3.0, ["code"]) == pytest.approx(runs.mean(DEFAULT, 3.0, ["prose"]) + 1)


def test_divergence_is_compared_as_likelihood_is():
    runs = samples(default=2.0, paper=2.5)
    found = runs.difference(DEFAULT, Arm("paper"), 3.0, what="kl")
    assert found["difference"] == pytest.approx(-0.05) and clear(found)
    assert runs.mean(DEFAULT, 3.0, what="kl") == pytest.approx(runs.mean(DEFAULT, 3.0) / 10)


def test_draws_are_averaged_window_by_window():
    runs = Samples({}, ["prose"], ["2-6"])
    for seed, nll in enumerate(([1.0, 2.0], [3.0, 6.0])):
        runs.runs[runs.key(Arm(f"random:seed={seed}"), 3.0, "prose")] = {"nll": nll, "tokens": [1, 1]}
    assert runs.pooled(RANDOM, 3.0)["nll"].tolist() == [2.0, 4.0]


def test_an_arm_that_was_refused_has_no_figures():
    runs = samples(default=2.0, paper=2.5)
    runs.runs[runs.key(DEFAULT, 3.0, "code")] = {"refused": "too small"}
    assert runs.mean(DEFAULT, 3.0) is None and runs.difference(DEFAULT, Arm("paper"), 3.0) is None
    assert runs.over_budgets(DEFAULT, Arm("paper"), [3.0, 4.0]) is None
    assert runs.mean(DEFAULT, 3.0, ["prose"]) is not None


def test_over_budgets_a_window_is_one_sample():
    runs = samples(default=2.0, paper=2.5)
    found = runs.over_budgets(DEFAULT, Arm("paper"), [3.0, 4.0], ["code"])
    once = runs.difference(DEFAULT, Arm("paper"), 3.0, ["code"])
    assert found["difference"] == pytest.approx(once["difference"])
    # Twice the same is no more to know.
    assert found["interval_95"] == pytest.approx(once["interval_95"])


def test_the_share_of_a_gap():
    runs = samples(default=2.3, b3=3.0, b16=2.0)
    found = runs.recovered((DEFAULT, 3.0), (Arm(bits=3), 3.0), (Arm(bits=16), None))
    assert found["share"] == pytest.approx(0.7)
    assert found["interval_95"] == pytest.approx([0.7, 0.7])


def test_the_summary_of_quality_counts_budgets_between_three_and_five_bits():
    runs = samples(default=2.2, b3=3.0, b16=2.0, uniform_dynamic=2.5, hotness=2.1)
    arms = {"2-6": [Arm(name, model="2-6") for name in ("default", "uniform-dynamic", "hotness")]}
    budgets = {"2-6": [3.0, 3.5, 4.0, 5.0]}
    quality.measure(runs, arms, budgets, 3.0)
    found = quality.summary(runs, arms, budgets, 3.0)
    assert found["better_at"] == found["closer_at"] == {"2-6": {"uniform-dynamic": ["3.5", "4"], "hotness": []}}
    everything = found["ladders"]["2-6"]["all"]
    assert everything["gap"]["same"]["recovered"]["share"] == pytest.approx(0.8)
    assert everything["gap"]["less"]["over_uniform"]["difference"] == pytest.approx(-0.8)
    made = quality.shown(found)
    rows = made["verdict"].splitlines()[2:]
    assert ["| yes |" in row for row in rows] == [True, False, True, False, True, True], made["verdict"]
    assert made["default over 2-6"].count("`uniform-dynamic`") == 3  # all texts, and each
    assert "80.0%" in made["gap"]
    pytest.importorskip("matplotlib")
    nats, differences = quality_plot.draw({"summary": found}).axes
    assert [line.get_label() for line in nats.lines] == ["default", "uniform-dynamic", "hotness"]
    np.testing.assert_allclose(nats.lines[0].get_ydata(), 0.2)
    assert len(differences.containers) == 2


def test_what_a_layer_does_is_read_off_its_interval():
    names = {"default": 2.0, "default:routing=off": 2.1, "default:residual=off": 1.9, "default:movement=off": 2.0}
    runs = samples(**names, **{"default:sensitivity=off": 2.4})
    found = ablation.summary(runs, [3.0, 3.5])
    assert found["routing"]["all"]["difference"] == pytest.approx(0.1)
    assert found["routing"]["paper"] == pytest.approx(0.04)
    made = ablation.shown(found, {"3": 2.0, "3.5": None})
    verdicts = dict(zip(found, made["verdict"].splitlines()[2:], strict=True))
    assert "| helps |" in verdicts["routing"] and "| harms |" in verdicts["residual"]
    assert "no difference" in verdicts["movement"]
    assert "+0.4000 [+0.4000, +0.4000]" in made["layers"] and "+0.24" in made["layers"]
    pytest.importorskip("matplotlib")
    (axis,) = ablation_plot.draw({"summary": found}).axes
    assert [c.get_label() for c in axis.containers] == ["budget 3", "budget 3.5", "all budgets"]


def test_changes_are_held_against_default_and_hotness():
    runs = samples(default=2.2, hotness=2.1)
    for i, name in enumerate((*changes.CHANGES, *changes.SETTINGS)):
        for budget in (3.0, 3.5):
            for text in runs.names:
                before = runs.of(DEFAULT, budget, text)
                more = {what: (np.array(before[what]) + i * np.array(TOKENS)).tolist() for what in ("nll", "kl")}
                runs.runs[runs.key(Arm(name), budget, text)] = before | more
    found = changes.summary(runs, [3.0, 3.5])
    for i, name in enumerate((*changes.CHANGES, *changes.SETTINGS)):
        for what in ("nll", "kl"):
            assert found[name]["default"][what]["all"]["difference"] == pytest.approx(i)
    assert found["default"]["hotness"]["kl"]["code"]["difference"] == pytest.approx(0.01)
    made = changes.shown(found)
    assert len(made["nll less hotness"].splitlines()) == 2 + len(found)
    assert len(made["kl less default"].splitlines()) == 1 + len(found)


def test_a_shift_is_held_against_calibration_on_what_is_served():
    runs = samples(default=2.0)
    runs.models = ["prose", "code", "math"]
    runs.names.append("math")
    costs = {"full": 0.1, "without routing": 0.2, "without residual": 0.15, "without both": 0.4}
    for model in runs.models:
        for name, arm in shift.ARMS.items():
            for text in runs.names:
                nats = 2.0 + (0 if model == text else costs[name]) + np.array([0.1, -0.1, 0.2, 0.0])
                key = runs.key(replace(arm, model=model), 3.0, text)
                runs.runs[key] = {"nll": (nats * TOKENS).tolist(), "tokens": TOKENS}
    found = shift.summary(runs, 3.0)
    row = found["prose | math"]
    assert {name: d["difference"] for name, d in row["over"].items()} == pytest.approx(costs)
    assert row["recovered"]["share"] == pytest.approx(0.75)
    assert "75.0% [75.0%, 75.0%]" in shift.shown(found)["shifts"]
    pytest.importorskip("matplotlib")
    (axis,) = shift_plot.draw({"summary": found}).axes
    assert [c.get_label() for c in axis.containers] == list(costs)

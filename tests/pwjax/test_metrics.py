"""Metrics of tasks against cases worked by hand from their published definitions."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwjax.errors import UsageError
from pwjax.evaluate import metrics

needs_rouge = pytest.mark.skipif(importlib.util.find_spec("rouge_score") is None, reason="needs rouge-score")


def test_normal_form():
    assert metrics.normalized("  The U.S.A., an\tAnt -- and a Bee! ") == "usa ant and bee"


@pytest.mark.parametrize(("prediction", "reference", "score"), [
    ("the cat sat on a mat", "cat on mat", 2 * 3 / 4 * 1 / (3 / 4 + 1)),  # cat sat on mat: 3 of 4, all 3
    ("Paris, Paris", "Paris", 2 * 0.5 / 1.5),  # a word counts as often as both have it
    ("", "x", 0), ("x", "", 0), ("the", "the", 0), ("London", "Paris", 0), ("Paris.", "paris", 1),
])  # fmt: skip
def test_question_answering(prediction, reference, score):
    assert metrics.qa_f1(prediction, reference) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "reference", "score"), [
    ("Paragraph 12", "Paragraph 12", 1), ("12", "Paragraph 12", 1), ("Paragraph 1", "Paragraph 12", 0),
    ("Paragraph 3 or Paragraph 12", "Paragraph 12", 0.5), ("12, 12 and 7", "Paragraph 12", 2 / 3),
    ("none", "Paragraph 12", 0), ("012", "Paragraph 12", 0), ("段落27。", "段落27", 1), ("段落2 段落27", "段落27", 0.5),
])  # fmt: skip
def test_retrieval(prediction, reference, score):
    assert metrics.retrieval(prediction, reference) == pytest.approx(score)


def test_retrieval_needs_a_paragraph():
    with pytest.raises(UsageError, match="must name a paragraph"):
        metrics.retrieval("7", "the seventh")
    assert metrics.numbers_right("5 of 10 or 5", "5") == pytest.approx(2 / 3)


def test_classification():
    classes = ["Individual", "Manner of an action", "Definition", "Description", "Definition of something"]
    score = lambda prediction, right: metrics.classification(prediction, right, classes)  # noqa: E731
    assert score("Type: Individual", "Individual") == 1
    assert score("Individual or Definition", "Individual") == 0.5
    assert score("Definition of something", "Definition of something") == 1  # "Definition" is part of it
    assert score("Definition of something", "Definition") == 0.5
    assert score("nothing known", "Individual") == 0


def test_code_similarity():
    assert metrics.code_similarity("```python\n# sum\nreturn a + b\nx", "return a + b") == 1
    # Of 12 and 12 characters, 11 in order are the same: 22 / 24.
    assert metrics.code_similarity("\nreturn a - b", "return a + b") == 0.92
    assert metrics.code_similarity("# only\n// comments", "x") == metrics.code_similarity("", "x") == 0


@needs_rouge
def test_rouge():
    # Of "the cat sat" and "the cat ran away": 2 in order; precision 2/3, recall 2/4. One pair of words of 2 and 3.
    assert metrics.rouge("the cat sat", "the cat ran away") == pytest.approx(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5))
    assert metrics.rouge("the cat sat", "the cat ran away", "rouge2") == pytest.approx(2 * (1 / 2) * (1 / 3) / (5 / 6))
    assert metrics.rouge("cat the", "the cat", "rouge1") == 1 and metrics.rouge("cat the", "the cat") == 0.5
    assert metrics.rouge("", "the cat") == 0


def test_chinese(monkeypatch):
    class Characters:
        @staticmethod
        def cut(text, cut_all):
            return iter(text)

    monkeypatch.setattr(metrics, "_import", lambda *_: Characters)
    assert metrics.qa_f1_zh("北京，市！", "北京") == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
    # Longest common subsequence of 天上飞 and 天飞了: 2 of 3 in both.
    assert metrics.rouge_zh("天上飞", "天飞了") == pytest.approx(2 / 3) and metrics.rouge_zh("", "天") == 0


def test_what_is_not_installed_is_named():
    with pytest.raises(UsageError, match="it needs the package no-such-package: pip install no-such-package"):
        metrics._import("no_such_package", "no-such-package", "it needs")


@pytest.mark.parametrize(("text", "strict", "last"), [
    ("6 * 3 = <<6*3=18>>18\n#### 18", "18", "18"), ("#### 1,234", "1234", "1234"), ("#### -5", "-5", "-5"),
    ("so $1,080.50 in all", None, "1080.50"), ("It is 42.", None, "42"), ("none", None, None),
    ("#### 3\n#### 4", "3", "4"),
])  # fmt: skip
def test_gsm8k_answers(text, strict, last):
    assert metrics.gsm8k_answer(text) == strict and metrics.last_number(text) == last


def test_gsm8k_scores():
    gold = "She has 9 * 2 = $<<9*2=18>>18.\n#### 18"
    assert metrics.gsm8k_strict("#### 18", gold) == 1 and metrics.gsm8k_strict("the answer is 18", gold) == 0
    assert metrics.gsm8k_strict("#### 18.0", gold) == 0 and metrics.gsm8k_flexible("18.0 dollars", gold) == 1
    assert metrics.gsm8k_flexible("18 or 19", gold) == 0 and metrics.gsm8k_strict("nothing", "no answer") == 0


def test_subspans():
    assert metrics.contains('It is "bb3b-A2": yes', "bb3ba2") == 1 and metrics.contains("bb3", "bb3ba2") == 0
    assert metrics.begins(" 12345.", "12345") == 1 and metrics.begins("is 12345", "12345") == 0


@given(st.text("ab 1", max_size=12), st.text("ab 1", max_size=12))
def test_scores_are_shares_and_the_same_text_is_right(prediction, reference):
    for metric in (metrics.qa_f1, metrics.code_similarity, metrics.contains, metrics.begins):
        assert 0 <= metric(prediction, reference) <= 1
    if metrics.normalized(reference):
        assert metrics.qa_f1(reference, reference) == metrics.contains(reference, reference) == 1

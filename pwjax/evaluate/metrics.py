"""Official metrics of tasks, as pure functions of a prediction and a reference: 0 is worst, 1 best.

Those of LongBench follow its published definitions; see :mod:`pwjax.evaluate.tasks` for which task has which.
"""

import difflib
import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from pwjax.errors import UsageError

CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
ROUGE = ("rouge1", "rouge2", "rougeL")


def normalized(text: str) -> str:
    """Lower case without punctuation, articles and superfluous spaces: SQuAD's normal form."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the tokens that both have, repetitions counted."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """Token F1 of normal forms: LongBench's question answering, as SQuAD defines it."""
    return token_f1(normalized(prediction).split(), normalized(reference).split())


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Token F1 of Chinese words without punctuation; jieba tells words apart. UsageError where it is not installed."""
    gone = set(string.punctuation + CHINESE_PUNCTUATION)

    def tokens(text: str) -> list[str]:
        plain = ("".join("".join(c for c in word.lower() if c not in gone).split()) for word in _words_zh(text))
        return [word for word in plain if word]

    return token_f1(tokens(prediction), tokens(reference))


def numbers_right(prediction: str, number: str) -> float:
    """Share of the whole numbers in ``prediction`` that are ``number``; 0 where there are none."""
    found = re.findall(r"\d+", prediction)
    return found.count(number) / len(found) if found else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """:func:`numbers_right` for the paragraph that ``reference`` names, as in "Paragraph 7" or its Chinese form."""
    named = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if named is None:
        raise UsageError(f"a retrieval answer must name a paragraph, such as 'Paragraph 7', got {reference!r}")
    return numbers_right(prediction, named[1])


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """One over the class names in ``prediction`` if the right one is among them; parts of the right name do not count.

    LongBench's own loop removes such parts while it walks the list, and so keeps every second one of them in a row.
    Here, too, for figures that compare.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """Similarity of the first line that is code and no comment or fence, in whole percents of difflib's ratio."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def rouge(prediction: str, reference: str, kind: str = "rougeL") -> float:
    """F measure of one of :data:`ROUGE` by the package rouge-score, stemmed. UsageError where it is not installed."""
    return float(_rouge().score(reference, prediction)[kind].fmeasure)


def rouge_zh(prediction: str, reference: str) -> float:
    """F measure of the longest common subsequence of Chinese words."""
    mine, theirs = list(_words_zh(prediction)), list(_words_zh(reference))
    row = [0] * (len(theirs) + 1)
    for word in mine:
        before = 0
        for j, other in enumerate(theirs):
            before, row[j + 1] = row[j + 1], before + 1 if word == other else max(row[j], row[j + 1])
    if not row[-1]:
        return 0.0
    precision, recall = row[-1] / len(mine), row[-1] / len(theirs)
    return 2 * precision * recall / (precision + recall)


def gsm8k_answer(text: str) -> str | None:
    """The number after ``####``, without commas: what GSM8K's own evaluation compares. None where there is none."""
    found = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return found[1].strip().replace(",", "") if found else None


def last_number(text: str) -> str | None:
    """The last number of ``text``, without commas, currency and a full stop at its end."""
    found = re.findall(r"-?\$?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "").replace("$", "") if found else None


def gsm8k_strict(prediction: str, reference: str) -> float:
    """Whether the prediction's ``####`` number is the reference's, character by character."""
    return float(gsm8k_answer(prediction) is not None and gsm8k_answer(prediction) == gsm8k_answer(reference))


def gsm8k_flexible(prediction: str, reference: str) -> float:
    """Whether the last number of the prediction is the reference's, by value."""
    mine, theirs = last_number(prediction), gsm8k_answer(reference)
    return float(mine is not None and theirs is not None and float(mine) == float(theirs))


def contains(prediction: str, reference: str) -> float:
    """Whether the reference's normal form is part of the prediction's (best_subspan_em of lost-in-the-middle)."""
    return float(normalized(reference) in normalized(prediction))


def begins(prediction: str, reference: str) -> float:
    """Whether the prediction begins with the reference, spaces in front aside: every token of it was likeliest."""
    return float(prediction.lstrip().startswith(reference))


@lru_cache(maxsize=1)
def _rouge():
    scorer = _import("rouge_score.rouge_scorer", "rouge-score", "ROUGE needs")
    return scorer.RougeScorer(list(ROUGE), use_stemmer=True)


def _words_zh(text: str):
    return _import("jieba", "jieba", "telling Chinese words apart needs").cut(text, cut_all=False)


def _import(module: str, package: str, what: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{what} the package {package}: pip install {package}") from error

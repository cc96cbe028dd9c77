"""Task files: layouts, prompts, needles; and runs of them that are killed and resumed."""

import gzip
import json

import numpy as np
import pytest

import pwjax.cli as cli
from pwjax.engine.text import Tokenizer
from pwjax.errors import UsageError
from pwjax.evaluate.run_tasks import middle_cut, run_items, summarize
from pwjax.evaluate.tasks import longbench, needle_rows, read_items

LONGBENCH = {"input": "who?", "context": "Paragraph 1: A fox.", "answers": ["Paragraph 1"], "length": 5,
             "dataset": "passage_retrieval_en", "language": "en", "all_classes": None, "_id": "x7"}  # fmt: skip
PAIRS = [
    {"task": "foxes", "good": "The quick brown fox jumps over the lazy dog.", "bad": "dog lazy the over jumps"},
    {"task": "foxes", "good": "The lazy dog.", "bad": "naïve café lazy the dog quick."},
    {"task": "code", "good": "def f(x):\n    return x + 1", "bad": "x + 1 return\n    (x)f def"},
]


def write(path, rows):
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_longbench_rows(tmp_path):
    rows = [LONGBENCH, {**LONGBENCH, "dataset": "passage_retrieval_nq10", "_id": "x8"},
            {**LONGBENCH, "dataset": "trec", "all_classes": ["A", "B"], "answers": ["A"], "_id": "x9"}]  # fmt: skip
    one, two, three = read_items(write(tmp_path / "t.jsonl.gz", rows))
    assert one.id == "t/x7" and one.metrics == ("retrieval",) and one.max_tokens == 32 and one.chat
    assert one.prompt.startswith("Here are 30 paragraphs") and "\n\nParagraph 1: A fox.\n\n" in one.prompt
    assert one.prompt.endswith("The answer is: ") and "{" not in one.prompt
    assert two.task == "passage_retrieval_nq10" and "which paragraph answers the question" in two.prompt
    assert one.scores("Paragraph 1 or 2") == {"retrieval": 0.5}
    # The first line counts alone, and a chat template would put itself between the examples.
    assert three.scores("\nA\nB") == {"classification": 1.0} and not three.chat


def test_every_longbench_task_can_be_scored():
    for name, task in longbench().items():
        assert "{context}" in task["prompt"] and task["max_tokens"] in (32, 64, 128, 512), name
    assert len(longbench()) == 21 + 1


def test_other_layouts(tmp_path):
    kv = {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "b", "value": "2"}
    item = read_items(write(tmp_path / "kv.jsonl", [kv]))[0]
    assert '{"a": "1",\n "b": "2"}' in item.prompt and item.prompt.endswith('Key: "b"\nCorresponding value:')
    assert item.scores(' "2"') == {"contains": 1.0} and item.details == {"keys": 2}
    solved = {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}
    item = read_items(write(tmp_path / "gsm.jsonl", [solved]), shots=[solved])[0]
    assert item.prompt == "Question: 1 + 1?\nAnswer: It is 2.\n#### 2\n\nQuestion: 1 + 1?\nAnswer:"
    assert item.scores("2\n#### 2") == {"strict": 1.0, "flexible": 1.0}
    blimp = {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "UID": "agreement"}
    items = read_items(write(tmp_path / "pairs.jsonl", [*PAIRS, blimp]), limit=4)
    assert [i.task for i in items] == ["foxes", "foxes", "code", "agreement"]
    assert items[3].pair == ("Cats sleep.", "Cats sleeps.") and items[3].id == "pairs/3"


def test_needles(tiny_tokenizer):
    tokenizer, text = Tokenizer.load(tiny_tokenizer), "The quick brown fox jumps over the lazy dog. " * 40
    rows = needle_rows(text, tokenizer, 300, 5)
    assert rows == needle_rows(text, tokenizer, 300, 5) and [r["depth"] for r in rows] == [0, 0.25, 0.5, 0.75, 1]
    for row in rows:
        # In front of a sentence: of the text before it, less than one is missing.
        place = row["context"].index(row["needle"])
        whole = len(row["context"]) - len(row["needle"]) - 1
        assert place == 0 or row["context"][place - 2 : place] == ". "
        assert row["depth"] * whole - 48 < place <= row["depth"] * whole + 16
    for row in rows:
        assert row["answer"] in row["needle"] and row["context"].count(row["answer"]) == 1
    with pytest.raises(UsageError, match="tokens, a needle test of 9999 needs as many"):
        needle_rows(text, tokenizer, 9999, 1)


@pytest.mark.parametrize(("line", "words"), [
    ("{", "line 1: not JSON"), ("[]", "line 1: a row is an object"), ("", "holds no row"),
    ('{"question": "x"}', "no known layout"), ('{"good": "x", "bad": 3}', "bad must be text"),
    (json.dumps({**LONGBENCH, "dataset": "else"}), "unknown LongBench dataset 'else'"),
])  # fmt: skip
def test_rows_that_cannot_be_read(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=words):
        read_items(path)


def test_long_prompts_lose_their_middle():
    assert middle_cut(range(10), 10) == list(range(10))
    assert middle_cut(range(10), 5) == [0, 1, 7, 8, 9] and middle_cut(range(10), 4) == [0, 1, 8, 9]


def test_summary():
    record = lambda task, score: {"task": task, "scores": {"m": score}, "finish_reason": "stop"}  # noqa: E731
    found = summarize([record("a", 1.0), record("a", 0.0), record("b", 1.0)])
    assert found["a"]["metrics"]["m"]["mean"] == 0.5 and found["a"]["metrics"]["m"]["stderr"] == pytest.approx(0.5)
    assert found["b"]["metrics"]["m"] == {"mean": 1.0, "stderr": None} and found["all"]["items"] == 3
    other = {"task": "c", "scores": {"n": 1.0}, "finish_reason": "stop"}
    assert "all" not in summarize([record("a", 1.0), other])


def test_pairs_are_judged_by_the_sum_of_log_probabilities(tmp_path, open_tiny, quick_programs):
    items = read_items(write(tmp_path / "pairs.jsonl", PAIRS))
    with open_tiny(bits=6) as engine:
        records = {record["id"]: record for record in run_items(engine, items)}
        tokenizer = engine.tokenizer
        for item in items:
            # No BOS in this tokenizer: the end of a text stands in front, so that the first token counts.
            sums = [engine.score([[0, *tokenizer.encode_plain(text)]])[0].sum() for text in item.pair]
            np.testing.assert_allclose(records[item.id]["logprobs"], sums, rtol=1e-5)
            assert records[item.id]["scores"] == {"accuracy": float(sums[0] > sums[1])}


def run(capsys, *argv):
    code = cli.main(["eval", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_resumes(capsys, tmp_path, tiny_artifact, budget_for, quick_programs):
    longer = [{**LONGBENCH, "context": "A fox. " * n, "_id": str(n)} for n in (1, 60)]
    files = write(tmp_path / "pairs.jsonl", PAIRS), write(tmp_path / "retrieval.jsonl", longer)
    budget, output = budget_for(tiny_artifact, 290, batch=4, context=128), tmp_path / "out.jsonl"
    base = (*files, "--model", tiny_artifact, "--memory-budget", budget, "--batch", 4, "--context", 128, "-o", output)
    code, out, err = run(capsys, *base, "--json", "-q")
    assert code == 0 and err == ""
    first, lines = json.loads(out), output.read_text().splitlines()
    assert set(first["tasks"]) == {"foxes", "code", "passage_retrieval_en"} and len(lines) == 5
    assert first["stats"]["memory"]["peak_bytes"] <= budget and first["policy"] == "default"
    assert all(r["prompt_tokens"] == 96 for r in map(json.loads, lines) if r["task"] == "passage_retrieval_en")
    # A kill in the middle of the fourth record.
    output.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    code, out, err = run(capsys, *base)
    assert code == 0 and "resuming: 3 of 5 results are there" in err and "passage_retrieval_en" in out
    assert {json.loads(line)["id"] for line in output.read_text().splitlines()} == {json.loads(x)["id"] for x in lines}
    assert run(capsys, *base, "--json", "-q")[1]  # nothing left to do
    code, _, err = run(capsys, *base, "--limit", 1)
    assert code == 2 and "was written with other settings" in err


def test_bad_usage(capsys, tmp_path, tiny_artifact):
    good, asked = write(tmp_path / "pairs.jsonl", PAIRS), {"question": "1 + 1?", "answer": "2\n#### 2"}
    gsm = write(tmp_path / "gsm.jsonl", [asked, asked])
    for argv, words in [
        ((), "give at least one task file"), ((good, "--shots", 2), "go together"),
        ((good, good), "two items have the same id"), ((tmp_path / "none.jsonl",), "cannot read the task file"),
        (("--needle", tmp_path / "none.txt"), "cannot read the text"),
        ((gsm, "--shots", 2, "--shots-from", good), "line 1: a solved question has question and answer"),
        ((gsm, "--shots", 3, "--shots-from", gsm), "has 2 solved questions, 3 are asked for"),
        ((good, "--shots", 2, "--shots-from", gsm), "none of the files has its layout"),
    ]:  # fmt: skip
        code, out, err = run(capsys, *argv, "--model", tiny_artifact)
        assert code == 2 and out == "" and words in err and err.count("\n") == 1

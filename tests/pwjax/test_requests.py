import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwjax.engine.requests import Request, as_requests, as_scored, read_requests, request_seed
from pwjax.engine.sampling import SamplingParams
from pwjax.errors import PromptError, UsageError


def read(text, defaults=None, **options):
    data = text if isinstance(text, bytes) else text.encode()
    return read_requests("-", defaults, stdin=io.BytesIO(data), **options)


def lines(*values):
    return "\n".join(json.dumps(v) for v in values)


def test_strings_objects_and_default_ids(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(lines("Once", {"id": "b", "prompt": "upon"}) + "\n\n" + lines({"prompt_token_ids": [1, 2]}) + "\n")
    first, second, third = read_requests(path)
    assert (first.id, first.prompt, first.prompt_token_ids) == (0, "Once", None)
    assert (second.id, second.prompt) == ("b", "upon")
    assert (third.id, third.prompt, third.prompt_token_ids) == (3, None, (1, 2))


def test_sampling_fields_override_the_defaults():
    defaults = SamplingParams(max_tokens=9, temperature=0.5, stop=("x",), logprobs=2)
    got, same, null = read(
        lines(
            {"prompt": "a", "temperature": 1, "top_k": 3, "stop": ["\n"], "stop_token_ids": [7], "seed": 11,
             "logprobs": None, "ignore_eos": True},
            "b",
            {"prompt": "c", "max_tokens": None, "stop": None, "seed": None},
        ),
        defaults,
    )
    assert got.sampling == SamplingParams(
        max_tokens=9, temperature=1, top_k=3, stop=("\n",), stop_token_ids=(7,), seed=11, ignore_eos=True
    )
    assert same.sampling == defaults.with_fields(seed=request_seed(0, 1))
    assert null.sampling == defaults.with_fields(seed=request_seed(0, 2))


def test_seeds_come_from_the_run_seed_and_the_id_not_the_order():
    a, b = {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}
    seeds = {r.id: r.sampling.seed for r in read(lines(a, b), SamplingParams(seed=5))}
    assert seeds == {r.id: r.sampling.seed for r in read(lines(b, a), SamplingParams(seed=5))}
    assert seeds["a"] != seeds["b"]
    assert seeds != {r.id: r.sampling.seed for r in read(lines(a, b), SamplingParams(seed=6))}


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1]", "must be a JSON string or object, got a list"),
        ("null", "got null"),
        ("3", "got a number"),
        ('""', "the prompt is empty"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": 3}', "prompt must be a string, got a number"),
        ('{"prompt": "\\ud800"}', "prompt is not valid Unicode"),
        ('{"id": "\\ud800", "prompt": "a"}', "id is not valid Unicode"),
        ('{"id": "x"}', "exactly one of prompt, prompt_token_ids and messages"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "exactly one of prompt"),
        ('{"prompt_token_ids": []}', "prompt_token_ids is empty"),
        ('{"prompt_token_ids": [1.5]}', "must be a list of whole numbers"),
        ('{"prompt_token_ids": [true]}', "must be a list of whole numbers"),
        ('{"prompt_token_ids": [4096]}', r"prompt_token_ids\[0\] is 4096; this model's token ids are 0 to 4095"),
        ('{"prompt_token_ids": [1, -1]}', r"prompt_token_ids\[1\] is -1"),
        ('{"prompt": "a", "stop_token_ids": [5000]}', r"stop_token_ids\[0\] is 5000"),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'; allowed are id, prompt, .*temperature"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be a finite number .*got nan"),
        ('{"prompt": "a", "top_p": 1.5}', "top_p must be a finite number from 0 to 1"),
        ('{"id": "first", "prompt": "a"}', "the id 'first' is already that of line 1"),
        ('{"id": true, "prompt": "a"}', "id must be a non-empty string or a whole number, got true"),
        ('{"id": "", "prompt": "a"}', "id must be"),
        ('{"id": ' + "9" * 5000 + "}", "not a request"),
        ("[" * 100_000, "not a request|not JSON"),
        (b'"\xff"', "not UTF-8 at byte 2"),
    ],
)
def test_a_bad_line_names_its_number_or_is_skipped(line, message):
    line = line if isinstance(line, bytes) else line.encode()
    data = lines({"id": "first", "prompt": "a"}).encode() + b"\n" + line + b"\n" + b'"last"\n'
    with pytest.raises(PromptError, match=rf"standard input, line 2: .*({message})"):
        read(data, vocab_size=4096)
    report = io.StringIO()
    left = read(data, vocab_size=4096, skip_bad_lines=True, report=report)
    assert [r.id for r in left] == ["first", 2]
    assert "skipped standard input, line 2: " in report.getvalue()
    assert "skipped 1 bad line of standard input, 2 left" in report.getvalue()


def test_ids_are_unique_as_text_and_against_line_numbers():
    with pytest.raises(PromptError, match=r"line 2: the id 7 is already that of line 1"):
        read(lines({"id": "7", "prompt": "a"}, {"id": 7, "prompt": "a"}))
    with pytest.raises(PromptError, match=r"line 2: the id 1 is already that of line 1"):
        read(lines({"id": 1, "prompt": "a"}, "b"))


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_an_empty_file_is_an_error(tmp_path, text):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=r"in\.jsonl holds no request"):
        read_requests(path)


def test_all_lines_skipped_is_an_error():
    with pytest.raises(PromptError, match="holds no request"):
        read("{\n{\n", skip_bad_lines=True, report=io.StringIO())


def test_unknown_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read the prompts file .*: No such file"):
        read_requests(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot read the prompts file .*: Is a directory"):
        read_requests(tmp_path)


def test_windows_line_ends_and_byte_order_mark():
    assert [r.prompt for r in read("\ufeff" + '"a"\r\n"b"\r\n')] == ["a", "b"]


@given(st.binary(max_size=80))
def test_any_bytes_give_requests_or_a_sentence(data):
    try:
        assert read(data)
    except PromptError as error:
        assert "standard input" in str(error)


class FakeTokenizer:
    def encode(self, text):
        return [ord(c) for c in text if c != " "]


def test_tokenized():
    tokenizer = FakeTokenizer()
    assert Request(0, "ab").tokenized(tokenizer, 128).prompt_token_ids == (97, 98)
    assert Request(0, None, (5,)).tokenized(tokenizer, 128).prompt_token_ids == (5,)
    with pytest.raises(PromptError, match=r"prompt_token_ids\[0\] is 128; this model's token ids are 0 to 127"):
        Request(0, None, (128,)).tokenized(tokenizer, 128)
    with pytest.raises(PromptError, match="no tokens"):
        Request(0, "  ").tokenized(tokenizer, 128)
    with pytest.raises(PromptError, match="needs a prompt"):
        Request(0)


@pytest.mark.parametrize("ids", [[5, 17], np.array([5, 17], np.int32), (np.int64(5), 17)])
def test_token_ids_become_plain_integers(ids):
    # The epoch log holds them as JSON.
    assert json.dumps(Request("a", prompt_token_ids=ids).prompt_token_ids) == "[5, 17]"
    for texts in (ids, [ids]):
        assert [json.dumps(request.prompt_token_ids) for request in as_scored(texts)] == ["[5, 17]"]


@pytest.mark.parametrize("texts", [{"prompt": "a"}, [{"prompt": "a"}], b"abc", [b"abc"], 5, [[1], 2]])
def test_what_is_no_text_to_score_is_named(texts):
    with pytest.raises(PromptError, match="give a string|must be a list of whole numbers"):
        as_scored(texts)


@pytest.mark.parametrize("name", [[1], None, "", True, 1.5, {}])
def test_what_is_no_id_is_named(name):
    with pytest.raises(PromptError, match="id must be"):
        Request(name, "x")
    assert json.dumps(Request(np.int64(3), "x").id) == "3"


@pytest.mark.parametrize("ids", [(1.5,), [None], 7, np.array([[1, 2]]), np.array([1.0])])
def test_what_are_no_token_ids_is_named(ids):
    for make in (lambda: Request("a", prompt_token_ids=ids), lambda: as_scored(["a", ids]), lambda: as_scored(7)):
        with pytest.raises(PromptError, match="must be a list of whole numbers, got"):
            make()


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, 3, [{"max_tokens": 3}]])
def test_what_is_no_sampling_is_named(sampling):
    for make in (lambda: as_requests("text", sampling), lambda: Request("a", "text", None, sampling)):
        with pytest.raises(PromptError, match="sampling must be pwjax.SamplingParams"):
            make()

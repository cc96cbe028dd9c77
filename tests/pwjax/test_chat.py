"""Chat templates: what they are rendered from, that they are boxed in, and that requests go through them."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

import pwjax.cli as cli
from pwjax.engine.chat import ChatTemplate, checked_messages
from pwjax.engine.requests import Request, read_requests
from pwjax.engine.text import Tokenizer
from pwjax.errors import CheckpointError, PromptError, UsageError

pytest.importorskip("jinja2")
SPEC = importlib.util.spec_from_file_location("chat_templates", Path(__file__).parents[1] / "chat_templates.py")
chats = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chats)


def template(text):
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})


def test_templates_in_the_manner_of_the_families():
    one, three = chats.CONVERSATIONS
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    asked = "<|im_start|>user\nhéllo <b>&amp;</b> 世界\n<|im_end|>\n<|im_start|>assistant\n"
    assert template(chats.CHATML).render(one) == system + asked
    assert template(chats.INST).render(three) == (
        "<s> [INST] héllo <b>&amp;</b> 世界\n [/INST] yes, ok</s> [INST]  and then?  [/INST]"
    )
    turn = "<s><start_of_turn>user\nhéllo <b>&amp;</b> 世界<end_of_turn>\n<start_of_turn>model\n4 1"
    assert template(chats.TURNS).render(one) == turn
    listed = [{"role": "user", "content": [{"type": "text", "text": one[0]["content"]}]}]
    assert template(chats.TURNS).render(listed) == turn
    assert '"é<"' in template("{{ messages[0].content | tojson }}").render([{"role": "user", "content": "é<"}])


def test_a_template_cannot_leave_its_box():
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_consts }}",
    ):
        with pytest.raises(PromptError, match="chat template"):
            template(text).render(chats.CONVERSATIONS[0])


def test_what_a_template_refuses_or_fails_on_is_a_sentence():
    with pytest.raises(PromptError, match="does not take these messages: roles must alternate"):
        template(chats.INST).render([chats.USER, chats.USER])
    with pytest.raises(PromptError, match="failed on these messages: TypeError"):
        template("{{ messages[0].content + 1 }}").render([chats.USER])
    with pytest.raises(CheckpointError, match="chat template is not valid"):
        template("{% for %}")


def test_where_a_template_is_found(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    config = {"chat_template": "A{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render([chats.USER]) == "A<s></s>"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    file.write_text(json.dumps({**config, "chat_template": named, "eos_token": None}))
    assert ChatTemplate.load(tmp_path).render([chats.USER]) == "D"
    (tmp_path / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render([chats.USER]) == "J"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config.json cannot be read"):
        ChatTemplate.load(tmp_path)


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"pip install 'pwjax\[chat\]'"):
        template("x")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hi", "must be a list"),
        ([], "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([chats.USER, {"content": "x"}], r"messages\[1\] must be an object"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
    ],
)
def test_messages_that_are_none(value, words):
    with pytest.raises(PromptError, match=words):
        checked_messages(value)


@pytest.fixture(scope="module")
def talker(tmp_path_factory, tiny_artifact):
    """The tiny artifact with a chat template, and a tokenizer that puts a BOS before every text."""
    out = tmp_path_factory.mktemp("chat") / "chat.pw"
    shutil.copytree(tiny_artifact, out)
    (out / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (out / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    return out


def test_requests_go_through_the_template_without_a_second_bos(talker, tmp_path):
    backend = Backend.from_file(str(talker / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = Tokenizer(backend, None, talker)
    asked = Request("a", messages=[{"role": "user", "content": "the fox"}]).tokenized(tokenizer, 300)
    assert asked.prompt == "<|endoftext|>the fox\n" and asked.prompt_token_ids.count(0) == 1
    assert asked.prompt_token_ids == tuple(tokenizer.encode("the fox\n"))
    # Nobody wrote a BOS, so there is one, and a prompt that brings its own has no two.
    assert tokenizer.encode("<|endoftext|>the fox") == tokenizer.encode("the fox")
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"id": "m", "messages": [{"role": "user", "content": "the fox"}]}\n"the fox"\n')
    chat, plain = read_requests(lines)
    assert chat.tokenized(tokenizer, 300).prompt_token_ids == asked.prompt_token_ids
    assert plain.messages is None and plain.prompt == "the fox"
    lines.write_text('{"messages": [{"content": "the fox"}]}\n')
    with pytest.raises(PromptError, match=r"line 1: messages\[0\] must be an object"):
        read_requests(lines)
    lines.write_text('{"messages": [{"role": "user", "content": "x"}], "prompt": "y"}\n')
    with pytest.raises(PromptError, match="exactly one of prompt, prompt_token_ids and messages"):
        read_requests(lines)


def test_the_command_renders_prompts_and_messages(talker):
    from pwjax.cli.generate import _rendered

    prompt, ids = Request(0, "the fox"), Request(1, None, (3, 4))
    talk = Request(2, messages=({"role": "user", "content": "hi"},))
    assert [r.prompt for r in _rendered([prompt, ids, talk], False, str(talker))] == [
        "the fox", None, "<|endoftext|>hi\n"
    ]  # fmt: skip
    rendered = _rendered([prompt, ids], True, str(talker))
    assert rendered[0].prompt == "<|endoftext|>the fox\n" and rendered[1] == ids
    assert rendered[0] == replace(prompt, prompt="<|endoftext|>the fox\n", messages=rendered[0].messages)


def test_a_model_without_a_template_says_so(capsys, tiny_artifact):
    assert cli.main(["generate", "--chat", "hello", "--model", str(tiny_artifact)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "has no chat template; give a prompt instead of messages" in captured.err

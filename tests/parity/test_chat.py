"""Chat templates against transformers: the same text and the same tokens."""

import importlib.util
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pwjax[hf]'")
pytest.importorskip("jinja2")

from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers import processors  # noqa: E402

from pwjax.engine.text import Tokenizer  # noqa: E402

pytestmark = pytest.mark.parity

SPEC = importlib.util.spec_from_file_location("chat_templates", Path(__file__).parents[1] / "chat_templates.py")
chats = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chats)


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_equal_text_and_tokens(tmp_path, tiny_tokenizer, name):
    backend = Backend.from_file(str(tiny_tokenizer))
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = chats.TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path, bos)
    for messages in chats.CONVERSATIONS:
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat_prompt(messages) == wanted
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_plain(wanted) == list(ids)
        assert ids.count(bos) == (0 if name == "chatml" else 1)
        # The rendered text given as a plain prompt has its one BOS too.
        assert ours.encode(wanted).count(bos) == 1

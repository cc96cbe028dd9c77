"""Chat templates: messages to the text that a chat model was trained on.

The template is Jinja text of the checkpoint, run in a sandbox with what transformers gives it: ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, ``break`` and ``continue``, and ``{% generation %}``.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pwjax.errors import CheckpointError, PromptError, UsageError

Message = Mapping[str, Any]
_CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """Template text and the special tokens that it may name (``bos_token`` and the like, as text).

    UsageError where jinja2 is not installed, CheckpointError where the text is no template.
    """

    def __init__(self, text: str, tokens: Mapping[str, str]):
        self.tokens = dict(tokens)
        self._template = _compile(text)

    @classmethod
    def load(cls, folder: str | Path) -> Self | None:
        """The template of a checkpoint or artifact directory, or None where it has none.

        ``chat_template.jinja`` counts before ``chat_template.json``, and that before ``tokenizer_config.json``.
        """
        folder = Path(folder)
        settings = _read(folder / _CONFIG)
        text = settings.get("chat_template")
        if (file := folder / "chat_template.json").exists():
            text = _read(file).get("chat_template", text)
        if (file := folder / "chat_template.jinja").exists():
            text = file.read_text("utf-8")
        if isinstance(text, list):
            # Several by name; the one for tools is not for plain messages.
            text = {entry["name"]: entry["template"] for entry in text}.get("default")
        if text is None:
            return None
        known = {**_read(folder / "special_tokens_map.json"), **settings}
        named = {key: value for key, value in known.items() if key.endswith("_token")}
        values = {key: v.get("content") if isinstance(v, dict) else v for key, v in named.items()}
        return cls(text, {key: v for key, v in values.items() if isinstance(v, str)})

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next message; it has its special tokens, so none must be added.

        ``messages`` as :func:`checked_messages` gives them. PromptError where the template does not take them.
        """
        import jinja2

        # What is null is left out, as transformers does: templates ask whether a key is there.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self.tokens
            )
        except jinja2.TemplateError as error:
            raise PromptError(f"the model's chat template does not take these messages: {error}") from error
        except Exception as error:  # whatever an expression of the template raises, such as a TypeError
            raise PromptError(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error


def checked_messages(value: Any) -> tuple[Message, ...]:
    """``value`` as messages, each an object with a ``role``; PromptError says what is wrong with it."""
    if not isinstance(value, list | tuple) or not value:
        raise PromptError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    for at, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f'messages[{at}] must be an object with "role" and "content", got {json.dumps(message)}')
        if message.get("content") is None and not message.get("tool_calls"):
            raise PromptError(f"messages[{at}] has no content")
    return tuple(value)


def _read(file: Path) -> dict:
    """A JSON object, empty where there is no file."""
    if not file.exists():
        return {}
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _compile(text: str):
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ImportError:
        raise UsageError("chat templates need jinja2, which is not installed: pip install 'pwjax[chat]'") from None

    class Generation(ext.Extension):
        """``{% generation %}`` marks what the assistant says, for training; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the model's chat template is not valid: {error}") from error

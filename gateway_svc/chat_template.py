"""Renders chats by the model's own chat template, in Hugging Face's format, in a Jinja sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway_svc.settings import BadSetting

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(Exception):
    """The template rejects these messages. There is no text, since it might quote them."""


class ChatTemplate:
    """A model's template, compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError where the source is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat as text that ends where the assistant's answer begins. Raises ChatTemplateError."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (
            Exception
        ) as error:  # a template is a program, and may fail in any way on messages that it does not expect
            raise ChatTemplateError from error


def load_chat_template(directory: Path, override: str | None = None) -> ChatTemplate | None:
    """The template of a tokenizer's directory, or None where it has none.

    `override` is the path of another template, or another template itself, and gets the same special tokens. Raises
    BadSetting where the override cannot be used, and jinja2.TemplateError, OSError or ValueError where a file of the
    directory is invalid.
    """
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    if override is not None:
        return _override(override, tokens)
    source = _named_default(config.get("chat_template"))
    # A separate file is the newer place, and takes precedence.
    if (own := directory / "chat_template.jinja").exists():
        source = own.read_text()
    return None if source is None else ChatTemplate(source, tokens)


def _override(setting: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        source = Path(setting).read_text()
    except (OSError, ValueError) as error:
        # A template without a tag and without a line break would ignore the messages, so this is a path.
        if not any(character in setting for character in "{}\n"):
            raise BadSetting(f"QUIRE_CHAT_TEMPLATE: {setting} cannot be read: {error}") from error
        source = setting
    try:
        return ChatTemplate(source, special_tokens)
    except TemplateSyntaxError as error:
        raise BadSetting(
            f"QUIRE_CHAT_TEMPLATE does not parse as a Jinja template: line {error.lineno}: {error.message}"
        ) from error
    except TemplateError as error:
        raise BadSetting(f"QUIRE_CHAT_TEMPLATE cannot be used as a Jinja template: {error}") from error


def _named_default(template: Any) -> str | None:
    """The one template, or the one named "default" of a list."""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's messages for training. It renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

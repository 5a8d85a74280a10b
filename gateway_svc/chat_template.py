"""Renders chats by the model's own chat template, in Hugging Face's format, in a Jinja sandbox."""

import hashlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway_svc.chats import PromptEnd
from gateway_svc.settings import BadSetting, read_template, read_template_variables
from svc_common.models import TEMPLATE_FOLDER

_CHAT_VARIABLES = ("messages", "tools", "add_generation_prompt")
_CLOCK = "strftime_now"  # the function by which templates write the date
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names of templates in transformers
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for the reasoning of a message."""
_PROBED = "probed_text"
_ROLES = ("user", "system", "developer", "assistant", "tool")  # that of users first: chats of the others have one
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(Exception):
    """The template rejects these messages. There is no text, since it might quote them."""


@dataclass(frozen=True, slots=True)
class TemplateChat:
    """A chat as templates take it: messages and tools as OpenAI's API has them, with arguments as the template wants
    them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the client, for the template: none of `ChatTemplate.own_variables`."""
    prompt_end: PromptEnd = PromptEnd.ANSWER
    callable_tools: Sequence[Mapping[str, Any]] = ()
    """Those that the answer may call; `tools` are what the template writes of them."""
    custom_tools: frozenset[str] = frozenset()
    """Names of those of them that take a text."""
    has_one_call: bool = False
    """The answer may have one call, not several."""
    must_call: bool = False
    """The answer is calls of tools, and no text."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to the text."""

    def digest(self) -> bytes:
        """SHA-256 of what the template gets of the chat. Takes milliseconds for a large one."""
        parts = (self.messages, self.tools, self.variables, self.prompt_end, self.add_special_tokens)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


class ChatTemplate:
    """A model's template, compiled once. Chats with tools may have another one, as in transformers."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_tokens: Sequence[str] | None = None,
        tool_use: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`control_tokens` are those of tokenizer_config.json that the template writes and that are not special.
        `tool_use` is the source of the template of chats with tools; None: it is the same. `defaults` are variables
        that a chat may replace: none of `own_variables`.

        Raises jinja2.TemplateError where a source is not a template.
        """
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals[_CLOCK] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError:
            raise
        except Exception as error:  # such as of Python's compiler, which takes 20 nested loops at most
            raise TemplateError(f"it cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.control_tokens = control_tokens
        # Templates of Hugging Face may rely on tools and documents being defined.
        self._defaults = {"documents": None, **(defaults or {})}
        self.tool_use = (
            None if tool_use is None else ChatTemplate(tool_use, special_tokens, control_tokens, defaults=defaults)
        )
        """The template of chats with tools, if that is another one."""
        parsed = environment.parse(source)
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))  # changes its argument
        """Names of all variables that it reads, or the one of chats with tools."""
        self.reads_clock = any(name.name == _CLOCK for name in parsed.find_all(nodes.Name))
        """Whether a chat may be another text at another time, also by the template of chats with tools."""
        self.own_variables = frozenset({*_CHAT_VARIABLES, *environment.globals, *special_tokens})
        """Names that a client's variables may not have."""
        constants = _constants(parsed)
        read = constants | {node.attr for node in parsed.find_all(nodes.Getattr)}
        self.reasoning_fields = tuple(name for name in REASONING_FIELDS if name in read) or REASONING_FIELDS[:1]
        """What a message has its reasoning in."""
        self.constants = "\0".join(constants)
        """All text that stands in the template, in parts; also in the one of chats with tools."""
        if self.tool_use is not None:
            self.variables |= self.tool_use.variables
            self.reads_clock |= self.tool_use.reads_clock
            self.constants = f"{self.constants}\0{self.tool_use.constants}"
        self._knows_developer = "developer" in constants
        # Nobody can guess it. By the space after it one sees whether the template strips the content.
        self._end_mark = f"{secrets.token_hex(16)} "
        self._roles_with_parts = self._find_roles_with_parts()

    def for_chat(self, *, has_tools: bool) -> "ChatTemplate":
        """The template that renders a chat with or without tools."""
        return self.tool_use if has_tools and self.tool_use is not None else self

    def role(self, name: str) -> str:
        """The role that a message of this role is rendered with: `system` for `developer` where the template does not
        name it. Templates either leave out messages of a role that they do not know, or write a role that the model was
        not trained on."""
        return "system" if name == "developer" and not self._knows_developer else name

    def render(self, chat: TemplateChat) -> str:
        """The chat as text that ends where `prompt_end` says. Raises ChatTemplateError."""
        if (template := self.for_chat(has_tools=chat.tools is not None)) is not self:
            return template.render(chat)
        messages = chat.messages
        is_continued = chat.prompt_end is PromptEnd.CONTINUATION
        if is_continued:
            *others, last = messages
            messages = [*others, {**last, "content": (last.get("content") or "") + self._end_mark}]
        text = self._render(replace(chat, messages=messages), self._roles_with_parts)
        return self._before_end_mark(text) if is_continued else text

    def _render(self, chat: TemplateChat, roles_with_parts: Collection[str]) -> str:
        """The chat, of which messages of these roles have their text in a list of parts. Raises ChatTemplateError."""
        variables = {
            **self._defaults,
            **chat.variables,
            "messages": [_with_parts(each) if each["role"] in roles_with_parts else each for each in chat.messages],
            "tools": chat.tools,
            "add_generation_prompt": chat.prompt_end is PromptEnd.ANSWER,
            **self._special_tokens,
        }
        try:
            return self._template.render(variables)
        except (
            Exception
        ) as error:  # a template is a program, and may fail in any way on messages that it does not expect
            raise ChatTemplateError from error

    def _find_roles_with_parts(self) -> frozenset[str]:
        """The roles of messages whose text the template writes only where it is in a list of parts, as templates of
        models that also take images may. They leave out a text that is no list, or fail.
        """
        found = frozenset[str]()
        for role in _ROLES:
            found |= {role} if not self._writes(role, found) and self._writes(role, found | {role}) else set()
        return found

    def _writes(self, role: str, roles_with_parts: Collection[str]) -> bool:
        """Whether the template writes the text of a message of this role."""
        user, message = {"role": "user", "content": "a"}, {"role": role, "content": _PROBED}
        is_after_user = role in ("assistant", "tool")
        messages = [user, message] if is_after_user else [message] if role == "user" else [message, user]
        try:
            return _PROBED in self._render(TemplateChat(messages, prompt_end=PromptEnd.MESSAGE), roles_with_parts)
        except ChatTemplateError:
            return False

    def _before_end_mark(self, text: str) -> str:
        """A rendered chat without what the template writes after its last message's content. As in transformers, white
        space at the content's end stays only where the template keeps it."""
        mark = self._end_mark
        end = text.rfind(mark.rstrip())
        if end < 0:
            raise ChatTemplateError
        return text[:end] if text.startswith(mark, end) else text[:end].rstrip()


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its text in a list of one part, as OpenAI's API has it."""
    content = message.get("content")
    return message if content is None else {**message, "content": [{"type": "text", "text": content}]}


def load_chat_template(
    directory: Path, override: str | None = None, variables: str | None = None
) -> ChatTemplate | None:
    """The template of a tokenizer's directory, or None where it has none.

    `override` is the path of another template, or another template itself, and gets the same special tokens.
    `variables`, a JSON object, are those that a chat may replace. Raises BadSetting where one of these cannot be used,
    and jinja2.TemplateError, OSError or ValueError where a file of the directory is invalid.
    """
    defaults = read_template_variables(variables)
    template = _load(directory, override, defaults)
    for name in () if template is None else sorted(template.own_variables & defaults.keys()):
        raise BadSetting(f"QUIRE_CHAT_TEMPLATE_KWARGS must not have {name}, which the template has already")
    return template


def _load(directory: Path, override: str | None, defaults: Mapping[str, Any]) -> ChatTemplate | None:
    config = load_tokenizer_config(directory)
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    control_tokens = _strings(config.get("chat_control_tokens"))
    if override is not None:
        return _override(override, tokens, control_tokens, defaults)
    # Separate files are the newer form, and take precedence. Some models that also take images have only a processor's.
    of_config = _named_templates(config.get("chat_template"))
    templates = _template_files(directory) or of_config or _processor_template(directory)
    source = templates.get(_DEFAULT, of_config.get(_DEFAULT))
    if source is None:
        return None
    return ChatTemplate(source, tokens, control_tokens, templates.get(_TOOL_USE), defaults)


def load_tokenizer_config(directory: Path) -> dict[str, Any]:
    """The contents of tokenizer_config.json, empty without the file. Raises OSError and ValueError."""
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json must be an object")
    return config


def _override(
    setting: str, special_tokens: Mapping[str, str], control_tokens: list[str] | None, defaults: Mapping[str, Any]
) -> ChatTemplate:
    try:
        return ChatTemplate(read_template(setting), special_tokens, control_tokens, defaults=defaults)
    except TemplateSyntaxError as error:
        raise BadSetting(
            f"QUIRE_CHAT_TEMPLATE does not parse as a Jinja template: line {error.lineno}: {error.message}"
        ) from error
    except TemplateError as error:
        raise BadSetting(f"QUIRE_CHAT_TEMPLATE cannot be used as a Jinja template: {error}") from error


def _template_files(directory: Path) -> dict[str, str]:
    """The templates in files of their own, by name."""
    named = {path.stem: path for path in (directory / TEMPLATE_FOLDER).glob("*.jinja")}
    if (own := directory / "chat_template.jinja").exists():
        named[_DEFAULT] = own
    return {name: path.read_text() for name, path in named.items()}


def _processor_template(directory: Path) -> dict[str, str]:
    """The template of chat_template.json, which processors had before chat_template.jinja, by its name."""
    path = directory / "chat_template.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError("chat_template.json must be an object")
    return _named_templates(content.get("chat_template"))


def _named_templates(templates: Any) -> dict[str, str]:
    """The templates of tokenizer_config.json by name: of a list, or the one that is there."""
    if isinstance(templates, list):
        if not all(
            isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in ("name", "template"))
            for entry in templates
        ):
            raise ValueError("chat_template must be a text, or a list of objects with the texts name and template")
        return {entry["name"]: entry["template"] for entry in templates}
    return {_DEFAULT: templates} if isinstance(templates, str) else {}


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _strings(value: Any) -> list[str] | None:
    if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("chat_control_tokens must be a list of strings")


def _constants(template: nodes.Template) -> set[str]:
    """Text outside tags, and strings in them."""
    texts = {node.data for node in template.find_all(nodes.TemplateData)}
    return texts | {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)}


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

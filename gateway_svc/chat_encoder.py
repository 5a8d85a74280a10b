"""Encodes chats so that control tokens come from the template alone: their literals in messages are text."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tokenizers import Encoding, Tokenizer

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.control_tokens import ControlTokens, literal_pattern, renamed_tokenizer, unguessable_names

_PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class ChatEncoder:
    """Encodes the chats of one tokenizer and template. What is said of messages holds for tools and variables too.

    A chat whose messages cannot make a control token is encoded as rendered. Any other is rendered again with
    placeholders in its messages: single characters that stand for literals of control tokens. The literals in that text
    are those that the template wrote. A second tokenizer, which has other names for control tokens, encodes the text
    with names in place of these literals, and with the messages' own literals in place of the placeholders.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._control = ControlTokens.find(tokenizer, template)
        literals = self._control.ids.keys()
        self._literal = literal_pattern(literals)
        self._beginnings = {literal[0] for literal in literals}
        names = unguessable_names(literals)
        self._names = {token_id: (literal, names[literal]) for literal, token_id in self._control.ids.items()}
        self._renamed = renamed_tokenizer(tokenizer, names)
        # A normalizer that applies to control tokens too may make one of other text than its literal.
        normalized = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.normalized}
        self._normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer and normalized & literals else None
        self._normalizes_literals = self._normalize is not None and any(
            literal not in self._normalize(literal) for literal in literals
        )

    def encode(self, chat: TemplateChat, rendered: str) -> list[int]:
        """Tokens of a chat that the template renders as `rendered`. Raises ChatTemplateError."""
        encoding = self._encoding(chat, rendered)
        return self._tokenizer.post_process(encoding).ids if chat.add_special_tokens else encoding.ids

    def encode_text(self, text: str) -> Encoding:
        """A text of a message alone: literals of control tokens are text. With offsets."""
        return self._renamed.encode_batch([text], add_special_tokens=False)[0]

    def _encoding(self, chat: TemplateChat, rendered: str) -> Encoding:
        if not self._names:
            return _encode(self._tokenizer, rendered)
        placeholders = None
        text = rendered
        if any(character in string for string in _strings_of(chat) for character in self._beginnings):
            placeholders = _Placeholders(chat)
            text = self._render(chat, rendered, placeholders)
        if text is rendered and not self._may_normalize_to_literals(rendered):
            return _encode(self._tokenizer, rendered)
        return self._encode_with_names(text, placeholders)

    def _may_normalize_to_literals(self, text: str) -> bool:
        """Whether the tokenizer's normalizer may make more control tokens of a text than its literals are."""
        if self._normalize is None:
            return False
        if self._normalizes_literals:
            return True
        return self._literal.findall(text) != self._literal.findall(self._normalize(text))

    def _render(self, chat: TemplateChat, rendered: str, placeholders: "_Placeholders") -> str:
        """The chat with placeholders for literals; `rendered` itself where its messages make no control token."""
        hidden = self._hide(chat, lambda kept, text: placeholders.hide(text, self._literal, kept))
        text = rendered if hidden == chat else self.template.render(hidden)
        # A template may cut a part out of a message, so that the rest becomes a literal. No literal is made of messages
        # that lack the character that it begins with.
        hidden = self._hide(hidden, lambda kept, text: placeholders.hide_beginnings(text, self._beginnings, kept))
        beginnings_hidden = self.template.render(hidden)
        if self._literal.findall(text) == self._literal.findall(beginnings_hidden):
            return text
        return beginnings_hidden

    def _hide(self, chat: TemplateChat, hide: Callable[[Collection[str], str], str]) -> TemplateChat:
        """The chat with `hide(literals to keep, string)` for each string, except for roles, which are validated."""
        hidden = []
        for message in chat.messages:
            in_answer = message["role"] == "assistant"
            fields = {}
            for name, value in message.items():
                kept = self._control.in_answers if in_answer and name == "content" else ()
                fields[name] = value if name == "role" else _replace_strings(value, partial(hide, kept))
            hidden.append(fields)
        replaced = partial(_replace_strings, replace=partial(hide, ()))
        return replace(chat, messages=hidden, tools=replaced(chat.tools), variables=replaced(chat.variables))

    def _encode_with_names(self, text: str, placeholders: "_Placeholders | None") -> Encoding:
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        restore: Callable[[str], str] = str if placeholders is None else placeholders.restore
        parts: list[str] = []
        end = 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._names:
                continue
            literal, name = self._names[token_id]
            # A token may take white space around it along. Text that only a normalizer made the literal stays text.
            place = text.find(literal, max(start, end), stop)
            if place >= 0:
                parts += restore(text[end:place]), name
                end = place + len(literal)
        return _encode(self._renamed, "".join((*parts, restore(text[end:]))))


class _Placeholders:
    """The placeholders of one chat: characters of the private-use areas that its strings do not contain."""

    def __init__(self, chat: TemplateChat) -> None:
        strings = (string for string in _strings_of(chat) if not string.isascii())
        used = {character for string in strings for character in _PRIVATE_USE.findall(string)}
        areas = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        self._free = (chr(code) for area in areas for code in area if chr(code) not in used)
        self._by_literal: dict[str, str] = {}

    def hide(self, text: str, literal: re.Pattern[str], kept: Collection[str]) -> str:
        """The text with placeholders for literals, except those to keep."""
        return literal.sub(lambda match: match[0] if match[0] in kept else self._placeholder(match[0]), text)

    def hide_beginnings(self, text: str, beginnings: Collection[str], kept: Collection[str]) -> str:
        """The text with placeholders for characters, except where one begins a literal to keep."""
        for character in beginnings:
            text = text.replace(character, self._placeholder(character))
        for literal in kept:
            text = text.replace(self._placeholder(literal[0]) + literal[1:], literal)
        return text

    def restore(self, text: str) -> str:
        """The text with the literals again."""
        literals = {placeholder: literal for literal, placeholder in self._by_literal.items()}
        return _PRIVATE_USE.sub(lambda match: literals.get(match[0], match[0]), text)

    def _placeholder(self, literal: str) -> str:
        if literal not in self._by_literal:
            placeholder = next(self._free, None)
            if placeholder is None:
                raise ChatTemplateError
            self._by_literal[literal] = placeholder
        return self._by_literal[literal]


def _replace_strings(value: Any, replace: Callable[[str], str]) -> Any:
    """A JSON value with its strings replaced, also names of fields."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {replace(key): _replace_strings(item, replace) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replace_strings(item, replace) for item in value]
    return value


def _strings_of(chat: TemplateChat) -> Iterator[str]:
    """All strings of a chat that are its client's."""
    for value in (chat.messages, chat.tools, chat.variables):
        yield from _client_strings(value)


def _client_strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, also names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _client_strings(key)
            yield from _client_strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _client_strings(item)


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    # The batched call, unlike the single one, releases the GIL.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]

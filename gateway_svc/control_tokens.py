"""Control tokens of a chat: which of a tokenizer's tokens they are, a pattern of their literals, and the same tokenizer
with other names for them.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.chats import PromptEnd

_NAME_LENGTH = 8
# Letters that no normalizer changes and no pre-tokenizer splits: Yi syllables have no case and no decomposition.
_NAME_LETTERS = [chr(code) for code in range(0xA000, 0xA48D)]


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Tokens that structure a chat: all special tokens, and other added tokens that the template writes, or that
    tokenizer_config.json lists as `chat_control_tokens`. Tokens of white space are none: templates have them as text.
    """

    ids: Mapping[str, int]
    """By the literal of each."""
    in_answers: frozenset[str]
    """Those that a model writes in its answers as visible text, such as `<think>`: control tokens that are not special,
    without those that the template writes around messages of users and the system."""

    @classmethod
    def find(cls, tokenizer: Tokenizer, template: ChatTemplate) -> "ControlTokens":
        added = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content.strip()
        }
        ordinary = {literal for literal, (_, token) in added.items() if not token.special}
        prompt = _rendered(template, "user") + _rendered(template, "system", "user")
        around_prompts = {literal for literal in ordinary if literal in prompt}
        if template.control_tokens is None:
            # A template may write a token in one piece, or put it together from a role.
            written = f"{template.constants}\0{_rendered(template, 'user', 'assistant')}"
            ordinary = around_prompts | {literal for literal in ordinary if literal in written}
        else:
            ordinary &= set(template.control_tokens)
        special = {literal for literal, (_, token) in added.items() if token.special}
        ids = {literal: added[literal][0] for literal in special | ordinary}
        return cls(ids, frozenset(ordinary - around_prompts))


def _rendered(template: ChatTemplate, *roles: str) -> str:
    """An empty chat of these roles; an empty text where the template rejects it."""
    try:
        messages = [{"role": role, "content": ""} for role in roles]
        return template.render(TemplateChat(messages, prompt_end=PromptEnd.MESSAGE))
    except ChatTemplateError:
        return ""


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of these literals at a place, in time that does not grow with their number."""
    return re.compile(_alternatives(set(literals)))


def _alternatives(words: set[str]) -> str:
    """A pattern that branches on one character after another, like a trie."""
    branches: dict[str, set[str]] = {}
    for word in words - {""}:
        branches.setdefault(word[0], set()).add(word[1:])
    patterns = [re.escape(first) + _alternatives(rests) for first, rests in sorted(branches.items())]
    if "" in words:
        return f"(?:{'|'.join(patterns)})?" if patterns else ""
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


def unguessable_names(literals: Iterable[str]) -> dict[str, str]:
    """A name for each literal that no text contains unless it was put there: 80 random bits.

    It begins and ends as the literal does, since some tokens are found only between characters that are no letters.
    """
    names = {}
    for literal in literals:
        letters = "".join(secrets.choice(_NAME_LETTERS) for _ in range(_NAME_LENGTH))
        names[literal] = f"{literal[0]}{letters}{literal[-1]}"
    return names


def renamed_tokenizer(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The same tokenizer, whose added tokens of these literals have other names and the same ids.

    So it encodes the literals as text, whatever is next to them. `names` is by literal.
    """
    parts = json.loads(tokenizer.to_str())
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    _rename_in_model(parts["model"], names)
    parts["post_processor"] = None  # it names tokens, and a template writes them itself
    return Tokenizer.from_str(json.dumps(parts))


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """A vocabulary may have control tokens too: without this, merges or a lattice could make one of text."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if not names.keys() & {left, right, left + right, left + right[prefix:]}
        ]

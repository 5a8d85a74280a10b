"""Pairs of texts as chats: the chat template of some models makes one prompt of a query and a document.

As sentence-transformers and vLLM have it, the two messages have the roles `query` and `document`.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.chats import PromptEnd
from gateway_svc.text_pairs import EncodedPair, PairForm, PairText, truncate_longest
from gateway_svc.tokenizer import InvalidModelFiles, ModelTokenizer
from gateway_svc.validated_request import TruncationSide
from svc_common.models import module_kind, read_json, read_modules

_SHORTEST = ("a", "a")  # a pair of a token each


@dataclass(frozen=True, slots=True)
class PairMessages:
    """How a pair becomes messages, by the files of sentence-transformers."""

    is_chosen: bool = False
    """Whether these files say that inputs are messages."""
    instruction: str | None = None
    """The message of the system; None: there is none."""
    has_parts: bool = False
    """Whether a message's content is a list of parts, not a text."""
    prompt_end: PromptEnd = PromptEnd.MESSAGE
    variables: Mapping[str, Any] = field(default_factory=dict)
    """For the template."""

    @classmethod
    def of(cls, directory: Path) -> "PairMessages":
        """Those of a model. Raises InvalidModelFiles for files of another form, and DamagedModelFile."""
        path = directory / "sentence_bert_config.json"
        config: dict[str, Any] = read_json(path, {})
        message = _object(config, "modality_config", path).get("message")
        content = message.get("format") if isinstance(message, dict) else None
        variables = dict(_object(_object(config, "processing_kwargs", path), "chat_template", path))
        adds_prompt = variables.pop("add_generation_prompt", False)
        variables.pop("restore_suffix", None)  # of sentence-transformers itself
        return cls(
            message is not None,
            _default_prompt(directory / "config_sentence_transformers.json"),
            content == "structured",
            PromptEnd.ANSWER if adds_prompt else PromptEnd.MESSAGE,
            variables,
        )

    def chat(self, query: str, document: str) -> TemplateChat:
        """The chat of a pair."""
        texts = (("system", self.instruction), ("query", query), ("document", document))
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.has_parts else text}
            for role, text in texts
            if text is not None
        ]
        return TemplateChat(messages, variables=self.variables, prompt_end=self.prompt_end)

    def fit(self, template: ChatTemplate) -> bool:
        """Whether a template writes both texts. One for the usual roles leaves them out, or rejects them."""
        query, document = secrets.token_hex(16), secrets.token_hex(16)
        rendered = _rendered(template, self.chat(query, document))
        return query in rendered and document in rendered

    def take_instructions(self, template: ChatTemplate) -> bool:
        """Whether a template that fits writes an instruction, too."""
        instruction = secrets.token_hex(16)
        return instruction in _rendered(template, self.with_instruction(instruction).chat(*_SHORTEST))

    def with_instruction(self, instruction: str) -> "PairMessages":
        """With another instruction: a template has it as the system's message, and as a variable, as vLLM gives it."""
        return replace(self, instruction=instruction, variables={**self.variables, "instruction": instruction})


class PairChats:
    """A `PairForm`: pairs as a model's chat template writes them."""

    of_chat: ClassVar[bool] = True

    def __init__(
        self, tokenizer: ModelTokenizer, messages: PairMessages, num_special: int, *, takes_instructions: bool
    ) -> None:
        self._tokenizer, self._messages = tokenizer, messages
        self.num_special = num_special
        self._takes_instructions = takes_instructions

    @classmethod
    def of(cls, tokenizer: ModelTokenizer, template: ChatTemplate, messages: PairMessages) -> "PairChats":
        """Of the tokenizer's template, which fits."""
        both = tokenizer.encode_chat_at_once(messages.chat(*_SHORTEST))
        takes_instructions = messages.take_instructions(template)
        return cls(tokenizer, messages, _num_special(both), takes_instructions=takes_instructions)

    async def with_instruction(self, instruction: str, tenant: str) -> "PairChats | None":
        """As `PairForm` says. Raises ChatTemplateError."""
        if not self._takes_instructions:
            return None
        messages = self._messages.with_instruction(instruction)
        both = await self._tokenizer.encode_chat(messages.chat(*_SHORTEST), tenant=tenant)
        return PairChats(self._tokenizer, messages, _num_special(both), takes_instructions=True)

    async def shorten(self, text: PairText, side: TruncationSide, tenant: str) -> PairText:
        """As `PairForm` says: each pair tokenizes its texts again."""
        num_kept = len(text.token_ids)
        if num_kept == text.num_all:
            return text
        kept = await self._tokenizer.cut_text_of_chat(text.text, num_kept, side, tenant)
        return replace(text, text=kept, num_tokens=num_kept, num_all=num_kept)

    async def join(
        self, first: PairText, second: PairText, num_kept: int | None, side: TruncationSide, tenant: str
    ) -> EncodedPair:
        """As `PairForm` says. Raises ChatTemplateError."""
        room = first.num_tokens + second.num_tokens
        if num_kept is not None:
            room = min(room, num_kept - self.num_special)
        while True:
            lengths = truncate_longest(first.num_tokens, second.num_tokens, room)
            texts = [
                one.text
                if length >= one.num_all
                else await self._tokenizer.cut_text_of_chat(one.text, length, side, tenant)
                for one, length in zip((first, second), lengths, strict=True)
            ]
            token_ids = await self._tokenizer.encode_chat(self._messages.chat(*texts), tenant=tenant)
            # Beside the template's text, that of a pair may have other tokens than alone.
            excess = 0 if num_kept is None else len(token_ids) - num_kept
            if excess <= 0 or room == 0:
                return EncodedPair(token_ids, len(token_ids))
            room = max(0, room - excess)


def pair_form(tokenizer: ModelTokenizer, directory: Path) -> PairForm:
    """How a model of a directory takes pairs of texts: by its chat template if this is for them, else by its tokenizer.

    Raises InvalidModelFiles where neither can be used, and DamagedModelFile as `read_modules` does.
    """
    messages = PairMessages.of(directory)
    answers = any(module_kind(module) == "LogitScore" for module in read_modules(directory))
    is_for_pairs = answers or messages.is_chosen
    template = tokenizer.chat_template
    if template is not None and (is_for_pairs or _names_both(template)):
        for form in (messages, replace(messages, has_parts=not messages.has_parts)):
            if form.fit(template):
                return PairChats.of(tokenizer, template, form)
    if is_for_pairs:
        raise InvalidModelFiles(
            f"{directory} has no chat template that writes the messages of a query and a document, of which the model "
            "makes scores: QUIRE_CHAT_TEMPLATE may name another one"
        )
    return tokenizer.pair_template


def _num_special(shortest: Sequence[int]) -> int:
    """How many tokens are not of the texts, of the shortest pair."""
    return max(0, len(shortest) - len(_SHORTEST))


def _rendered(template: ChatTemplate, chat: TemplateChat) -> str:
    """The prompt of a chat; empty if the template rejects it."""
    try:
        return template.render(chat)
    except ChatTemplateError:
        return ""


def _names_both(template: ChatTemplate) -> bool:
    """Whether a template is made for pairs. One for chats may write a message of any role."""
    return {"query", "document"} <= set(template.constants.split("\0"))


def _object(config: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InvalidModelFiles(f"{path}: {name} must be an object")
    return value


def _default_prompt(path: Path) -> str | None:
    config: dict[str, Any] = read_json(path, {})
    name = config.get("default_prompt_name")
    if name is None:
        return None
    prompt = _object(config, "prompts", path).get(name) if isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise InvalidModelFiles(f"{path}: default_prompt_name is {name}, and prompts has no text of that name")
    return prompt or None

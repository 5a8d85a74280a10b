"""Pairs of texts as chats: the chat template of some models makes one prompt of a query and a document.

As sentence-transformers and vLLM have it, the two messages have the roles `query` and `document`.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.chats import PromptEnd
from gateway_svc.text_pairs import EncodedPair, PairForm, PairText, truncate_longest
from gateway_svc.tokenizer import InvalidModelFiles, ModelTokenizer
from gateway_svc.validated_request import TruncationSide
from svc_common.models import module_kind, read_modules


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
        """Those of a model. Raises InvalidModelFiles for files of another form."""
        config = _read(directory / "sentence_bert_config.json")
        try:
            variables = dict(config.get("processing_kwargs", {}).get("chat_template", {}))
            message = config.get("modality_config", {}).get("message")
            has_parts = (message or {}).get("format") == "structured"
            prompts = _read(directory / "config_sentence_transformers.json")
            name = prompts.get("default_prompt_name")
            instruction = None if name is None else str(prompts.get("prompts", {})[name])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidModelFiles(f"files of sentence-transformers in {directory} have another form") from error
        adds_prompt = variables.pop("add_generation_prompt", False)
        variables.pop("restore_suffix", None)  # of sentence-transformers itself
        return cls(
            message is not None,
            instruction or None,
            has_parts,
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
        try:
            rendered = template.render(self.chat(query, document))
        except ChatTemplateError:
            return False
        return query in rendered and document in rendered


class PairChats:
    """A `PairForm`: pairs as a model's chat template writes them."""

    def __init__(self, tokenizer: ModelTokenizer, messages: PairMessages, num_special: int) -> None:
        self._tokenizer, self._messages = tokenizer, messages
        self.num_special = num_special

    @classmethod
    def of(cls, tokenizer: ModelTokenizer, messages: PairMessages) -> "PairChats":
        """Of a template that fits."""
        both = tokenizer.encode_chat_at_once(messages.chat("a", "a"))
        return cls(tokenizer, messages, max(0, len(both) - 2))

    async def join(
        self, first: PairText, second: PairText, num_kept: int | None, side: TruncationSide, tenant: str
    ) -> EncodedPair:
        """As `PairForm` says. Raises ChatTemplateError."""
        lengths = [first.num_tokens, second.num_tokens]
        if num_kept is not None:
            lengths = truncate_longest(first.num_tokens, second.num_tokens, num_kept - self.num_special)
        while True:
            texts = [
                one.text if length >= one.num_all else await self._tokenizer.cut_text(one.text, length, side, tenant)
                for one, length in zip((first, second), lengths, strict=True)
            ]
            token_ids = await self._tokenizer.encode_chat(self._messages.chat(*texts), tenant=tenant)
            # Beside the template's text, that of a pair may have other tokens than alone.
            excess = 0 if num_kept is None else len(token_ids) - num_kept
            longer = 0 if lengths[0] > lengths[1] else 1
            if excess <= 0 or lengths[longer] == 0:
                return EncodedPair(token_ids, len(token_ids))
            lengths[longer] = max(0, lengths[longer] - excess)


def pair_form(tokenizer: ModelTokenizer, directory: Path) -> PairForm:
    """How a model of a directory takes pairs of texts: by its chat template if this is for them, else by its tokenizer.

    Raises InvalidModelFiles where neither can be used, and ModelNotFound as `read_modules` does.
    """
    template, messages = tokenizer.chat_template, PairMessages.of(directory)
    answers = any(module_kind(module) == "LogitScore" for module in read_modules(directory))
    if template is not None and (answers or messages.is_chosen or _names_both(template)) and messages.fit(template):
        return PairChats.of(tokenizer, messages)
    if answers:
        raise InvalidModelFiles(
            f"{directory} has no chat template that writes the messages of a query and a document, of which the model "
            "makes scores: QUIRE_CHAT_TEMPLATE may name another one"
        )
    return tokenizer.pair_template


def _names_both(template: ChatTemplate) -> bool:
    """Whether a template is made for pairs. One for chats may write a message of any role."""
    return {"query", "document"} <= set(template.constants.split("\0"))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise InvalidModelFiles(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModelFiles(f"{path} must be an object")
    return value

"""A model's tokenizer: text and chats to tokens and back, in threads, so that the event loop is not blocked."""

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from gateway_svc.chat_encoder import ChatEncoder
from gateway_svc.chat_template import ChatTemplate, TemplateChat, load_chat_template, load_tokenizer_config
from gateway_svc.infilling import InfillForm
from gateway_svc.tenant_threads import TenantThreads
from gateway_svc.text_pairs import PairTemplate
from gateway_svc.validated_request import SpecialTokens, TruncationSide
from gateway_svc.vocabulary import Vocabulary
from svc_common.keys import DEFAULT_TENANT_NAME
from svc_common.models import DamagedModelFile, eos_token_ids_of
from svc_common.tokenizer_errors import tokenizer_errors

T = TypeVar("T")

# Two for one tenant, and one that it leaves to others.
_NUM_THREADS = 3
# Characters of the texts of a call. About 0.3 ms: less than the way to a thread and back is worth.
_FEW_CHARACTERS = 1_024
# About 10 ms: tenants take turns with the threads.
_MANY_CHARACTERS = 32_768


class InvalidModelFiles(Exception):  # noqa: N818
    """A model directory with a missing or invalid file. The text is for the operator."""


class PromptTooLong(Exception):  # noqa: N818
    """A text with more tokens than allowed."""


@dataclass(frozen=True, slots=True)
class TextToEncode:
    """A text, and what is kept of its tokens. `num_kept` counts the special ones, and is above their number; None: all
    are kept.
    """

    text: str
    add_special_tokens: bool = True
    """Whether it gets the special tokens that the tokenizer adds."""
    num_kept: int | None = None
    side: TruncationSide = TruncationSide.RIGHT
    """Where it loses tokens; the special ones stay."""
    of_chat: bool = False
    """Whether literals of control tokens are text, as in a chat; the model has a chat template then."""


class ModelTokenizer:
    """Tokenizer, chat template and end-of-text tokens of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: Mapping[str, Any] | None,
        chat_template: ChatTemplate | None,
        eos_token_ids: Sequence[int],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`decoder` is the object of that name in tokenizer.json, `config` the one in tokenizer_config.json."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_encoder = None if chat_template is None else ChatEncoder(tokenizer, chat_template)
        self.eos_token_ids = tuple(eos_token_ids)
        self.config = config or {}
        self.vocabulary = Vocabulary(tokenizer, decoder)
        self._threads = TenantThreads(_NUM_THREADS, "tokenize")

    @classmethod
    def load(
        cls,
        directory: Path,
        tokenizer_directory: Path | None = None,
        chat_template: str | None = None,
        template_variables: str | None = None,
    ) -> "ModelTokenizer":
        """Reads tokenizer.json and its companions, from a separate directory if one is given.

        `chat_template` is the setting that replaces the tokenizer's, `template_variables` that of its variables.
        End-of-text tokens are always the model's.
        Raises InvalidModelFiles and BadSetting.
        """
        source = tokenizer_directory or directory
        try:
            eos_token_ids = eos_token_ids_of(directory)
        except DamagedModelFile as error:
            raise InvalidModelFiles(str(error)) from error
        except ValueError as error:
            raise InvalidModelFiles(f"{directory} names no end-of-text token that can be used: {error}") from error
        try:
            data = (source / "tokenizer.json").read_bytes()
            parts = json.loads(data)
            if not isinstance(parts, dict):
                raise ValueError("tokenizer.json must be an object")
            decoder = parts.get("decoder")
            template = load_chat_template(source, chat_template, template_variables)
            config = load_tokenizer_config(source)
        except (OSError, ValueError, KeyError, RecursionError, TemplateError) as error:
            raise InvalidModelFiles(f"{source} holds no tokenizer that can be used: {error}") from error
        with tokenizer_errors(lambda error: InvalidModelFiles(f"{source / 'tokenizer.json'} cannot be used: {error}")):
            return cls(Tokenizer.from_buffer(data), decoder, template, eos_token_ids, config)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None: chats cannot be rendered."""
        return None if self._chat_encoder is None else self._chat_encoder.template

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens the tokenizer adds to a text."""
        return self._tokenizer.num_special_tokens_to_add(False)

    @cached_property
    def pair_template(self) -> PairTemplate:
        """How a pair of texts is one prompt. Raises InvalidModelFiles if the tokenizer makes none of two texts."""
        try:
            return PairTemplate.of(self._tokenizer)
        except ValueError as error:
            raise InvalidModelFiles(f"tokenizer.json {error}") from error

    @cached_property
    def infill_form(self) -> InfillForm | None:
        """How the model takes the text around a gap; None: it fills none."""
        return InfillForm.of(self.vocabulary.added)

    def end_token_ids(self, *, fills_gap: bool) -> tuple[int, ...]:
        """The tokens that end an answer; one that fills a gap has more of them."""
        more = self.infill_form.end_token_ids if fills_gap and self.infill_form is not None else ()
        return tuple(dict.fromkeys((*self.eos_token_ids, *more)))

    def check_end_of_text(self) -> None:
        """Raises InvalidModelFiles if tokenizer_config.json wants an end-of-text token behind each text, of which
        decoders make vectors and scores, and tokenizer.json does not add one.
        """
        eos = self.config.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if self.config.get("add_eos_token") is not True or text is None:
            return
        if self._tokenizer.encode("a").ids[-1:] != [self._tokenizer.token_to_id(str(text))]:
            raise InvalidModelFiles(
                f"tokenizer_config.json has add_eos_token, and tokenizer.json does not add {text} to a text: load the "
                "tokenizer with transformers, and write it with save_pretrained"
            )

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Does work for a tenant's request in the threads of this tokenizer."""
        return await self._threads.run(tenant, work)

    async def run_if_long(self, tenant: str, cost: float, work: Callable[[], T]) -> T:
        """Does work that takes about `cost` microseconds; in these threads if that is long."""
        return await self._threads.run_if_long(tenant, cost, work)

    async def encode_text(
        self,
        text: str,
        max_tokens: int | None = None,
        tenant: str = DEFAULT_TENANT_NAME,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer adds, unless `add_special_tokens` is false. A
        literal of an added token is this token.

        Raises PromptTooLong, without tokenizing it, for a text that cannot have as few as `max_tokens`.
        """
        return await self._threads.run(tenant, lambda: self._encode_text(text, max_tokens, add_special_tokens))

    async def encode_texts(
        self, texts: Sequence[TextToEncode], tenant: str = DEFAULT_TENANT_NAME
    ) -> AsyncGenerator[list[int], None]:
        """The tokens of each text of a call, in order. Many texts are one piece of work; the next piece begins once its
        tokens are asked for. The texts are not longer than `may_have` allows.
        """
        if sum(len(one.text) for one in texts) <= _FEW_CHARACTERS:
            for one in texts:
                yield self._encode(one)
            return
        for piece in _pieces(texts):
            for token_ids in await self._threads.run(tenant, partial(self._encode_all, piece)):
                yield token_ids

    def may_have(self, text: str, num_tokens: int) -> bool:
        """Whether a text may have as few tokens as that, by its length alone."""
        return len(text) <= num_tokens * self.vocabulary.longest_token

    async def encode_words(self, words: Sequence[str], tenant: str = DEFAULT_TENANT_NAME) -> list[list[int]]:
        """The tokens of bad words, as vLLM makes them: each word at the start of a text, and after a space if that is
        one more way to begin as many tokens.
        """
        return await self._threads.run(tenant, lambda: self._encode_words(words))

    async def encode_chat(
        self,
        chat: TemplateChat,
        max_tokens: int | None = None,
        tenant: str = DEFAULT_TENANT_NAME,
    ) -> list[int]:
        """Tokens of a chat, up to its `prompt_end`. Literals of control tokens in its strings are text.

        Raises ChatTemplateError, and as encode_text.
        """
        return await self._threads.run(tenant, lambda: self._encode_chat(chat, max_tokens))

    def encode_chat_at_once(self, chat: TemplateChat) -> list[int]:
        """As `encode_chat`, on the calling thread."""
        return self._encode_chat(chat, None)

    async def cut_text_of_chat(
        self, text: str, num_kept: int, side: TruncationSide, tenant: str = DEFAULT_TENANT_NAME
    ) -> str:
        """The part of a text that has at most `num_kept` of its tokens, as `TextToEncode.of_chat` has them; those at
        `side` are dropped.
        """
        return await self._threads.run(tenant, lambda: self._cut_text(text, num_kept, side))

    async def decode(self, token_ids: Sequence[int], special: SpecialTokens, tenant: str = DEFAULT_TENANT_NAME) -> str:
        hide = special is SpecialTokens.HIDDEN
        return await self._threads.run(tenant, lambda: self._tokenizer.decode(token_ids, skip_special_tokens=hide))

    async def token_strs(self, token_ids: Sequence[int], tenant: str = DEFAULT_TENANT_NAME) -> list[str]:
        """Tokens as the vocabulary spells them, such as `Ġworld`; empty for ids that it does not have."""
        return await self._threads.run(tenant, lambda: [self._tokenizer.id_to_token(one) or "" for one in token_ids])

    def close(self) -> None:
        self._threads.close()

    def _encode_text(self, text: str, max_tokens: int | None, add_special_tokens: bool = True) -> list[int]:
        self._check_length(text, max_tokens)
        # The batched call, unlike the single one, releases the GIL.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _encode_all(self, texts: Sequence[TextToEncode]) -> list[list[int]]:
        return [self._encode(one) for one in texts]

    def _encode(self, one: TextToEncode) -> list[int]:
        if one.of_chat:
            return self._encoding_of_chat(one.text).ids
        if one.num_kept is None:
            return self._encode_text(one.text, None, one.add_special_tokens)
        encoding = self._tokenizer.encode_batch_fast([one.text], add_special_tokens=False)[0]
        # The tokenizer could truncate by itself, but that is a setting which all threads would share.
        num_special = self.num_special_tokens if one.add_special_tokens else 0
        encoding.truncate(one.num_kept - num_special, direction=one.side.value)
        return self._tokenizer.post_process(encoding, add_special_tokens=one.add_special_tokens).ids

    def _encode_words(self, words: Sequence[str]) -> list[list[int]]:
        bare = [word.lstrip() for word in words]
        texts = [*bare, *(f" {word}" for word in bare)]
        encoded = [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        found: list[list[int]] = []
        for alone, after_space in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
            found.append(alone)
            if alone and len(after_space) == len(alone) and after_space[0] != alone[0]:
                found.append(after_space)
        return found

    def _encode_chat(self, chat: TemplateChat, max_tokens: int | None) -> list[int]:
        assert self._chat_encoder is not None, "the caller looks at chat_template"
        rendered = self._chat_encoder.template.render(chat)
        self._check_length(rendered, max_tokens)
        return self._chat_encoder.encode(chat, rendered)

    def _encoding_of_chat(self, text: str) -> Encoding:
        assert self._chat_encoder is not None, "the caller looks at chat_template"
        return self._chat_encoder.encode_text(text)

    def _cut_text(self, text: str, num_kept: int, side: TruncationSide) -> str:
        offsets = self._encoding_of_chat(text).offsets
        if num_kept >= len(offsets):
            return text
        if num_kept <= 0:
            return ""
        # A character whose tokens are not all kept is dropped.
        if side is TruncationSide.LEFT:
            return text[max(offsets[-num_kept][0], offsets[-num_kept - 1][1]) :]
        return text[: min(offsets[num_kept - 1][1], offsets[num_kept][0])]

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and not self.may_have(text, max_tokens):
            raise PromptTooLong


def _pieces(texts: Sequence[TextToEncode]) -> Iterator[list[TextToEncode]]:
    """The texts in pieces of many characters; a longer text is a piece of its own."""
    piece: list[TextToEncode] = []
    num_characters = 0
    for one in texts:
        if piece and num_characters + len(one.text) > _MANY_CHARACTERS:
            yield piece
            piece, num_characters = [], 0
        piece.append(one)
        num_characters += len(one.text)
    if piece:
        yield piece

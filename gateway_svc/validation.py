"""The one validator of both protocols: an unvalidated request becomes a validated one, or an error that names the field
as the client spelled it."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from gateway_svc.answer_constraints import answer_constraint, digest_of_form, form_size
from gateway_svc.chat_template import ChatTemplateError
from gateway_svc.chat_validation import ChatValidator
from gateway_svc.chats import ChatPrompt, PromptEnd
from gateway_svc.common_fields import CommonFields
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.infilling import infill_text
from gateway_svc.loop_yield import LoopYield
from gateway_svc.message_formats.description import MessageFormat
from gateway_svc.sampling_checks import (
    check_num_logprobs,
    check_num_prompt_logprobs,
    check_tokens_left,
    source_of_seeds,
    with_own_seed,
    without_defaults,
)
from gateway_svc.sampling_fields import DEFAULT_MAX_LOGPROBS
from gateway_svc.tokenizer import ModelTokenizer, PromptTooLong
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import (
    EndOfText,
    GenerationDefaults,
    InfillPrompt,
    MaxTokensRange,
    Prompt,
    TextPrompt,
    TokenPrompt,
    UnvalidatedRequest,
)
from gateway_svc.validated_request import (
    BeforeDefaults,
    ModelInfo,
    Sampling,
    Stopping,
    TruncationSide,
    ValidatedRequest,
)
from gateway_svc.work_costs import FORM_CHARACTER, MESSAGE_CHECK
from svc_common.keys import DEFAULT_TENANT_NAME

ROLES = ("system", "developer", "user", "assistant", "tool")

_MAX_CONTEXTS = 16  # that a prompt may have which is truncated
_TAIL_TOKENS = 32  # that a prompt may have from a marker of reasoning on
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens. `turn` is the format of a chat's answer; None: all output is text. `chat_digest` is that of a
    chat whose tokens change with the time; else empty."""

    token_ids: list[int]
    turn: TurnFormat | None = None
    chat_digest: bytes = b""


class Validator:
    """Validates requests for one model. `defaults` are the operator's; `roles` are those that the operator adds.

    Without `grammars`, constraints on the output are not served. Without a `message_format`, answers are
    text. `max_logprobs` bounds how many top tokens are reported with each. Of `seed` those of requests without one are
    drawn; None: they are random.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        defaults: GenerationDefaults | None = None,
        roles: Sequence[str] = (),
        grammars: GrammarChecker | None = None,
        message_format: MessageFormat | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._seeds = source_of_seeds(seed)
        self._max_logprobs = max_logprobs
        template = tokenizer.chat_template
        self._reads_clock = template is not None and template.reads_clock
        self._chats = None
        if template is not None:
            self._chats = ChatValidator(template, (*ROLES, *roles), message_format or MessageFormat())
        self._grammars = grammars
        self._defaults = defaults or GenerationDefaults()

    async def generation(
        self,
        unvalidated: UnvalidatedRequest,
        model: ModelInfo,
        field_path: FieldPath,
        generated_id: str,
        tenant: str = DEFAULT_TENANT_NAME,
    ) -> ValidatedRequest:
        """The validated request of a call with one prompt: as `generations`."""
        prompts = [(unvalidated.prompt, field_path)]
        (one,) = await self.generations(unvalidated, prompts, model, generated_id, tenant)
        return one

    async def generations(
        self,
        unvalidated: UnvalidatedRequest,
        prompts: Sequence[tuple[Prompt | None, FieldPath]],
        model: ModelInfo,
        generated_id: str,
        tenant: str = DEFAULT_TENANT_NAME,
    ) -> list[ValidatedRequest]:
        """The validated requests of a call's prompts, which replace that of `unvalidated`; fields are spelled by the
        paths beside them. `generated_id` names requests that their client did not name. The tokenizer's threads are
        shared by `tenant`.

        Raises QuireError. The cheapest checks come first.
        """
        check = FieldChecker(prompts[0][1])
        common = CommonFields.of(
            unvalidated, self._defaults, model, check, generated_id, self._max_logprobs, self._seeds
        )
        requests: list[ValidatedRequest] = []
        loop_yield = LoopYield()
        for prompt, field_path in prompts:
            await loop_yield.before_prompt(len(prompt.token_ids) if isinstance(prompt, TokenPrompt) else 0)
            if requests:
                common.sampling = with_own_seed(common.sampling, self._seeds)
            requests.append(await self._generation(common, prompt, model, field_path, tenant))
        return requests

    async def _generation(
        self, common: CommonFields, prompt: Prompt | None, model: ModelInfo, field_path: FieldPath, tenant: str
    ) -> ValidatedRequest:
        """The validated request of one prompt. Raises QuireError."""
        check = FieldChecker(field_path)
        unvalidated = replace(common.filled, prompt=prompt)
        side = unvalidated.truncation_side
        encoded = await self._encode_prompt(prompt, common.num_kept, side, model, check, tenant)
        prompt_token_ids = encoded.token_ids
        check_num_prompt_logprobs(common.prompt_logprobs, len(prompt_token_ids), check)
        stopping = self._stopping(unvalidated, common, model, len(prompt_token_ids), check)
        num_tokens = common.best_of * stopping.max_tokens
        check_num_logprobs(common.logprobs, len(unvalidated.logprob_token_ids), num_tokens, check)
        sampling = await self._with_bad_words(common, stopping, model, check, tenant)
        grammar = await self._grammar(unvalidated, encoded.turn, common, model, check, tenant)
        before_defaults = None
        if common.filled is not common.as_sent:
            as_sent, room = common.as_sent, model.context_length - len(prompt_token_ids)
            before_defaults = BeforeDefaults(without_defaults(sampling, as_sent, model), _max_tokens(as_sent, room))
        return ValidatedRequest(
            request_id=common.request_id,
            on_disconnect=common.on_disconnect,
            model=model.name,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stopping=stopping,
            n=common.n,
            best_of=common.best_of,
            beam_search=common.beam_search,
            logprobs=common.logprobs,
            priority=common.priority,
            special_tokens=unvalidated.special_tokens,
            logprob_token_ids=tuple(unvalidated.logprob_token_ids),
            prompt_logprobs=common.prompt_logprobs,
            echo=unvalidated.echo,
            omits_output=unvalidated.omits_output,
            grammar=grammar,
            form_digest=await self._form_digest(common, tenant),
            turn=encoded.turn,
            clock_digest=_digest_with_limits(encoded.chat_digest, common) if encoded.chat_digest else b"",
            before_defaults=before_defaults,
            cache_salt=unvalidated.cache_salt or "",
            field_path=field_path,
        )

    async def _form_digest(self, common: CommonFields, tenant: str) -> str:
        """The digest of the constraint and the tools, which the prompts have in common."""
        if common.form_digest is None:
            digest = partial(digest_of_form, common.filled)
            cost = FORM_CHARACTER * form_size(common.filled)
            common.form_digest = await self._tokenizer.run_if_long(tenant, cost, digest)
        return common.form_digest

    async def _with_bad_words(
        self, common: CommonFields, stopping: Stopping, model: ModelInfo, check: FieldChecker, tenant: str
    ) -> Sampling:
        """With the tokens of bad words. Raises QuireError if all tokens might be suppressed at once."""
        if common.bad_words is None:
            words = common.filled.bad_words
            common.bad_words = tuple(map(tuple, await self._tokenizer.encode_words(words, tenant) if words else []))
        sampling = replace(common.sampling, bad_words=common.bad_words)
        if stopping.suppressed_token_ids not in common.suppressed:
            check_tokens_left(sampling, stopping, model, check)
            common.suppressed.add(stopping.suppressed_token_ids)
        return sampling

    async def _encode_prompt(
        self,
        prompt: Prompt | None,
        num_kept: int | None,
        side: TruncationSide,
        model: ModelInfo,
        check: FieldChecker,
        tenant: str,
    ) -> EncodedPrompt:
        """A prompt that leaves room in the context. One with more tokens than `num_kept` is truncated at `side`."""
        where = prompt_field(prompt)
        room = model.context_length - 1
        most = max_prompt_tokens(model, is_truncated=num_kept is not None)
        kept = _kept_tokens(num_kept, side)
        if isinstance(prompt, TokenPrompt):
            # Length first: the ids of a prompt that is too long are not checked.
            if len(prompt.token_ids) > most:
                raise check.too_long(where, len(prompt.token_ids), model)
            check.token_ids(where, prompt.token_ids, model)
            encoded = EncodedPrompt(list(prompt.token_ids)[kept])
        elif isinstance(prompt, TextPrompt) and not prompt.text:  # even where special tokens are added
            raise check.invalid(where, "must not be empty")
        else:
            try:
                encoded = await self.encode(prompt, check, most, tenant, kept)
            except PromptTooLong:
                raise check.too_long(where, None, model) from None
            check.tokens_of_text(where, encoded.token_ids, model)
        if not encoded.token_ids:
            raise check.invalid(where, "must not be empty")
        if len(encoded.token_ids) > room:
            raise check.too_long(where, len(encoded.token_ids), model)
        return encoded

    async def encode(
        self,
        prompt: TextPrompt | InfillPrompt | ChatPrompt | None,
        check: FieldChecker,
        max_tokens: int | None = None,
        tenant: str = DEFAULT_TENANT_NAME,
        kept: slice = _ALL,
    ) -> EncodedPrompt:
        """The `kept` tokens of a text, which may be empty, or of a chat.

        Raises QuireError, and PromptTooLong where the text alone shows that there are more than `max_tokens`.
        """
        if prompt is None:
            raise check.invalid(Field.PROMPT, "must be given")
        if isinstance(prompt, InfillPrompt):
            prompt = infill_text(prompt, self._tokenizer.infill_form, check)
        if isinstance(prompt, TextPrompt):
            check.unicode(check.field_path(Field.TEXT), prompt.text)
            token_ids = await self._tokenizer.encode_text(
                prompt.text, max_tokens, tenant, add_special_tokens=prompt.add_special_tokens
            )
            return EncodedPrompt(token_ids[kept])
        if not prompt.messages:
            raise check.invalid(Field.MESSAGES, "must not be empty")
        if self._chats is None:
            raise check.unsupported(Field.MESSAGES, "this model has no chat template")
        # Templates write at least a token for each. To look at all of more messages could take a second.
        if max_tokens is not None and len(prompt.messages) > max_tokens:
            raise PromptTooLong
        read = partial(self._chats.template_chat, prompt, check)
        cost = inf if prompt.has_json else MESSAGE_CHECK * len(prompt.messages)
        chat = await self._tokenizer.run_if_long(tenant, cost, read)
        try:
            token_ids = await self._tokenizer.encode_chat(chat, max_tokens, tenant)
        except ChatTemplateError:
            raise check.invalid(Field.MESSAGES, "the model's chat template does not take these messages") from None
        if kept.stop is not None and kept.stop < len(token_ids):  # without what the template writes at the end
            chat = replace(chat, prompt_end=PromptEnd.MESSAGE)
        token_ids = token_ids[kept]
        tail = self._tokenizer.vocabulary.text(token_ids[-_TAIL_TOKENS:])
        digest = await self._tokenizer.run(tenant, chat.digest) if self._reads_clock else b""
        return EncodedPrompt(token_ids, TurnFormat.of_prompt(self._chats.message_format, chat, tail), digest)

    async def _grammar(
        self,
        unvalidated: UnvalidatedRequest,
        turn: TurnFormat | None,
        common: CommonFields,
        model: ModelInfo,
        check: FieldChecker,
        tenant: str,
    ) -> str:
        """What the output must match; empty: any text."""
        constraint = answer_constraint(unvalidated, turn, self._tokenizer.vocabulary.added, check)
        if constraint is None:
            return ""
        if self._grammars is None:
            raise check.unsupported(constraint.field, "is not served")
        # There are few: answers to chats differ in whether the prompt ends within the reasoning.
        for known, grammar in common.grammars:
            if known == constraint:
                return grammar
        grammar = await self._grammars.grammar(constraint, model.vocab_size, check.field_path, tenant)
        common.grammars.append((constraint, grammar))
        return grammar

    def _stopping(
        self,
        unvalidated: UnvalidatedRequest,
        common: CommonFields,
        model: ModelInfo,
        prompt_length: int,
        check: FieldChecker,
    ) -> Stopping:
        room = model.context_length - prompt_length
        given = unvalidated.max_tokens
        if given is not None and given > _most_max_tokens(unvalidated.max_tokens_range, room, model):
            tokens = f"{prompt_length} tokens of prompt and {given} more do not fit the context"
            raise check.beyond_context(Field.MAX_TOKENS, tokens, model)
        max_tokens = _max_tokens(unvalidated, room)
        min_tokens = unvalidated.min_tokens or 0
        if not 0 <= min_tokens <= max_tokens:
            raise check.invalid(Field.MIN_TOKENS, f"must be between 0 and max_tokens, which is {max_tokens}")
        end_token_ids = self._tokenizer.end_token_ids(fills_gap=isinstance(unvalidated.prompt, InfillPrompt))
        # The model's files may name others, which are never sampled; workers refuse to suppress them.
        eos_token_ids = tuple(token_id for token_id in end_token_ids if token_id < model.vocab_size)
        ends = unvalidated.end_of_text is EndOfText.ENDS
        return Stopping(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stops=common.stops,
            stop_token_ids=tuple(unvalidated.stop_token_ids),
            eos_token_ids=eos_token_ids if ends else (),
            stop_text=unvalidated.stop_text,
            ignored_eos_token_ids=() if ends else eos_token_ids,
        )


def max_prompt_tokens(model: ModelInfo, *, is_truncated: bool) -> int:
    """The most tokens that a prompt may have. Chats have at most as many messages: templates write at least a token for
    each."""
    return _MAX_CONTEXTS * model.context_length if is_truncated else model.context_length - 1


def _kept_tokens(num_kept: int | None, side: TruncationSide) -> slice:
    """Which tokens of a prompt are kept: at most `num_kept`; None: all."""
    if num_kept is None:
        return _ALL
    return slice(-num_kept, None) if side is TruncationSide.LEFT else slice(num_kept)


def prompt_field(prompt: Prompt | None) -> Field:
    """The field that holds a prompt."""
    match prompt:
        case None:
            return Field.PROMPT
        case TextPrompt() | InfillPrompt():
            return Field.TEXT
        case TokenPrompt():
            return Field.TOKEN_IDS
        case ChatPrompt():
            return Field.MESSAGES


def _digest_with_limits(chat_digest: bytes, common: CommonFields) -> bytes:
    """Of a chat and of what limits its prompt and its answer, as the client sent it."""
    sent, side = common.as_sent, common.as_sent.truncation_side
    is_unlimited = sent.max_tokens_range is MaxTokensRange.UNLIMITED
    limits = (sent.max_tokens, sent.default_max_tokens, is_unlimited, common.num_kept, side.value)
    return hashlib.sha256(chat_digest + json.dumps(limits).encode()).digest()


def _most_max_tokens(max_tokens_range: MaxTokensRange, room: int, model: ModelInfo) -> float:
    """The highest max_tokens that is not refused beside a prompt that leaves `room`."""
    match max_tokens_range:
        case MaxTokensRange.ROOM:
            return room
        case MaxTokensRange.CONTEXT:
            return model.context_length
        case MaxTokensRange.UNLIMITED:
            return math.inf


def _max_tokens(unvalidated: UnvalidatedRequest, room: int) -> int:
    """The most tokens to generate, at most what the prompt leaves of the context."""
    if unvalidated.max_tokens is not None:
        return min(room, max(1, unvalidated.max_tokens))  # of no output, one token is generated
    return room if unvalidated.default_max_tokens is None else min(room, unvalidated.default_max_tokens)

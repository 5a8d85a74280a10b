"""The one validator of both protocols: an unvalidated request becomes a validated one, or an error that names the field
as the client spelled it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway_svc.answer_constraints import answer_constraint, digest_of_form
from gateway_svc.chat_template import ChatTemplateError
from gateway_svc.chat_validation import ChatValidator
from gateway_svc.chats import ChatPrompt
from gateway_svc.constraint_checks import check_constraint
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.infilling import check_infilling, infill_text
from gateway_svc.message_formats.description import MessageFormat
from gateway_svc.sampling_checks import (
    check_banned,
    check_logprobs,
    check_max_tokens,
    check_num_logprobs,
    check_num_prompt_logprobs,
    check_prompt_logprobs,
    check_sampling,
    check_tokens_left,
    without_defaults,
)
from gateway_svc.sampling_fields import DEFAULT_MAX_LOGPROBS, SAMPLING_FIELDS
from gateway_svc.stop_strings import StopString
from gateway_svc.tokenizer import ModelTokenizer, PromptTooLong
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import (
    EndOfText,
    GenerationDefaults,
    InfillPrompt,
    Prompt,
    ResponseMode,
    TextPrompt,
    TokenPrompt,
    UnvalidatedRequest,
)
from gateway_svc.validated_request import (
    BeamSearchParams,
    BeforeDefaults,
    EarlyStopping,
    ModelInfo,
    OnDisconnect,
    Sampling,
    Stopping,
    TruncationSide,
    ValidatedRequest,
)
from svc_common.errors import QuireError, Reason
from svc_common.keys import DEFAULT_TENANT_NAME

MAX_SEQUENCES = 128
MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10
MAX_STOPS = 64
MAX_STOP_LENGTH = 1_024

ROLES = ("system", "developer", "user", "assistant", "tool")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_CONTEXTS = 16  # that a prompt may have which is truncated
_TAIL_TOKENS = 32  # that a prompt may have from a marker of reasoning on


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens. `turn` is the format of a chat's answer; None: all output is text."""

    token_ids: list[int]
    turn: TurnFormat | None = None


class Validator:
    """Validates requests for one model. `defaults` are the operator's; `roles` are those that the operator adds.

    Without `grammars`, constraints on the output are not served. Without a `message_format`, answers are
    text. `max_logprobs` bounds how many top tokens are reported with each.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        defaults: GenerationDefaults | None = None,
        roles: Sequence[str] = (),
        grammars: GrammarChecker | None = None,
        message_format: MessageFormat | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_logprobs = max_logprobs
        template = tokenizer.chat_template
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
        """The validated request. `generated_id` names a request that its client did not name. The tokenizer's threads
        are shared by `tenant`.

        Raises QuireError. The cheapest checks come first.
        """
        check = FieldChecker(field_path)
        as_sent, unvalidated = unvalidated, self._defaults.fill(unvalidated)
        request_id, on_disconnect = _identity(unvalidated, check, generated_id)
        sampling = check_sampling(unvalidated, model, check)
        n = check.integer(Field.N, unvalidated.n, 1, 1, MAX_SEQUENCES)
        beam_search = _beam_search(unvalidated, n, check)
        check_constraint(unvalidated, check)
        best_of = _best_of(unvalidated, n, check)
        logprobs = check_logprobs(unvalidated, model, check, self._max_logprobs)
        priority = check.integer(Field.PRIORITY, unvalidated.priority, 0, -(2**31), 2**31 - 1)
        _check_stops(unvalidated, model, check)
        check_banned(unvalidated, model, check)
        prompt_logprobs = check_prompt_logprobs(unvalidated, check, self._max_logprobs)
        check_max_tokens(unvalidated, check)
        check_infilling(unvalidated, check)
        num_kept = _num_kept(unvalidated, model, check)
        side = unvalidated.truncation_side
        prompt = await self._encode_prompt(unvalidated.prompt, num_kept, side, model, check, tenant)
        prompt_token_ids = prompt.token_ids
        check_num_prompt_logprobs(prompt_logprobs, len(prompt_token_ids), check)
        stopping = self._stopping(unvalidated, model, len(prompt_token_ids), check)
        check_num_logprobs(logprobs, len(unvalidated.logprob_token_ids), best_of * stopping.max_tokens, check)
        sampling = await self._with_bad_words(sampling, stopping, unvalidated, model, check, tenant)
        grammar = await self._grammar(unvalidated, prompt.turn, model, check, tenant)
        before_defaults = None
        if unvalidated is not as_sent:
            room = model.context_length - len(prompt_token_ids)
            before_defaults = BeforeDefaults(without_defaults(sampling, as_sent, model), _max_tokens(as_sent, room))
        return ValidatedRequest(
            request_id=request_id,
            on_disconnect=on_disconnect,
            model=model.name,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stopping=stopping,
            n=n,
            best_of=best_of,
            beam_search=beam_search,
            logprobs=logprobs,
            priority=priority,
            special_tokens=unvalidated.special_tokens,
            logprob_token_ids=tuple(unvalidated.logprob_token_ids),
            prompt_logprobs=prompt_logprobs,
            echo=unvalidated.echo,
            omits_output=unvalidated.omits_output,
            grammar=grammar,
            form_digest=digest_of_form(unvalidated),
            turn=prompt.turn,
            before_defaults=before_defaults,
            field_path=field_path,
        )

    async def _with_bad_words(
        self,
        sampling: Sampling,
        stopping: Stopping,
        unvalidated: UnvalidatedRequest,
        model: ModelInfo,
        check: FieldChecker,
        tenant: str,
    ) -> Sampling:
        """With the tokens of bad words. Raises QuireError if all tokens might be suppressed at once."""
        words = await self._tokenizer.encode_words(unvalidated.bad_words, tenant) if unvalidated.bad_words else []
        sampling = replace(sampling, bad_words=tuple(map(tuple, words)))
        check_tokens_left(sampling, stopping, model, check)
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
        most = room if num_kept is None else _MAX_CONTEXTS * model.context_length
        if isinstance(prompt, TokenPrompt):
            # Length first: the ids of a prompt that is too long are not checked.
            if len(prompt.token_ids) > most:
                raise check.too_long(where, len(prompt.token_ids), model)
            check.token_ids(where, prompt.token_ids, model)
            encoded = EncodedPrompt(list(prompt.token_ids))
        else:
            try:
                encoded = await self.encode(prompt, check, most, tenant)
            except PromptTooLong:
                raise check.too_long(where, None, model) from None
        if num_kept is not None:
            of_all = slice(-num_kept, None) if side is TruncationSide.LEFT else slice(num_kept)
            encoded = replace(encoded, token_ids=encoded.token_ids[of_all])
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
    ) -> EncodedPrompt:
        """A text or chat as tokens. Raises QuireError, and PromptTooLong where the text alone shows that there are more
        than `max_tokens`."""
        if prompt is None:
            raise check.invalid(Field.PROMPT, "must be given")
        if isinstance(prompt, InfillPrompt):
            prompt = infill_text(prompt, self._tokenizer.infill_form, check)
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise check.invalid(Field.TEXT, "must not be empty")
            check.unicode(check.field_path(Field.TEXT), prompt.text)
            return EncodedPrompt(
                await self._tokenizer.encode_text(
                    prompt.text, max_tokens, tenant, add_special_tokens=prompt.add_special_tokens
                )
            )
        if not prompt.messages:
            raise check.invalid(Field.MESSAGES, "must not be empty")
        if self._chats is None:
            raise check.unsupported(Field.MESSAGES, "this model has no chat template")
        # Templates write at least a token for each. To look at all of more messages could take a second.
        if max_tokens is not None and len(prompt.messages) > max_tokens:
            raise PromptTooLong
        read = partial(self._chats.template_chat, prompt, check)
        chat = await self._tokenizer.run(tenant, read) if prompt.has_json else read()
        try:
            token_ids = await self._tokenizer.encode_chat(chat, max_tokens, tenant)
        except ChatTemplateError:
            raise check.invalid(Field.MESSAGES, "the model's chat template does not take these messages") from None
        tail = self._tokenizer.vocabulary.text(token_ids[-_TAIL_TOKENS:])
        return EncodedPrompt(token_ids, TurnFormat.of_prompt(self._chats.message_format, chat, tail))

    async def _grammar(
        self,
        unvalidated: UnvalidatedRequest,
        turn: TurnFormat | None,
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
        return await self._grammars.grammar(constraint, model.vocab_size, check.field_path, tenant)

    def _stopping(
        self, unvalidated: UnvalidatedRequest, model: ModelInfo, prompt_length: int, check: FieldChecker
    ) -> Stopping:
        room = model.context_length - prompt_length
        max_tokens = _max_tokens(unvalidated, room)
        if max_tokens > room:
            raise QuireError(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"{prompt_length} tokens of prompt and {max_tokens} more do not fit the context of "
                f"{model.context_length} tokens",
                field=check.field_path(Field.MAX_TOKENS),
            )
        min_tokens = unvalidated.min_tokens or 0
        if not 0 <= min_tokens <= max_tokens:
            raise check.invalid(Field.MIN_TOKENS, f"must be between 0 and max_tokens, which is {max_tokens}")
        eos_token_ids = self._tokenizer.end_token_ids(fills_gap=isinstance(unvalidated.prompt, InfillPrompt))
        ends = unvalidated.end_of_text is EndOfText.ENDS
        return Stopping(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stops=tuple(StopString.compile(stop) for stop in dict.fromkeys(unvalidated.stop)),
            stop_token_ids=tuple(unvalidated.stop_token_ids),
            eos_token_ids=eos_token_ids if ends else (),
            stop_text=unvalidated.stop_text,
            ignored_eos_token_ids=() if ends else eos_token_ids,
        )


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


def is_request_id(text: str) -> bool:
    """Whether this is a valid name of a request."""
    return _REQUEST_ID.fullmatch(text) is not None


def _identity(unvalidated: UnvalidatedRequest, check: FieldChecker, generated_id: str) -> tuple[str, OnDisconnect]:
    if unvalidated.request_id is None:
        return generated_id, OnDisconnect.CANCEL
    if not is_request_id(unvalidated.request_id):
        raise check.invalid(Field.REQUEST_ID, "must be 1 to 128 letters, digits, '.', '_', ':' or '-'")
    return unvalidated.request_id, OnDisconnect.DETACH


def _max_tokens(unvalidated: UnvalidatedRequest, room: int) -> int:
    """The most tokens to generate. A length that the client did not set is limited by the context."""
    if unvalidated.max_tokens is not None:
        return max(1, unvalidated.max_tokens)  # of no output, one token is generated
    return room if unvalidated.default_max_tokens is None else min(room, unvalidated.default_max_tokens)


def _num_kept(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker) -> int | None:
    """How many of the prompt's tokens are kept; None: a longer prompt is refused."""
    num_kept = unvalidated.truncate_prompt_tokens
    if num_kept == -1:
        reserved = unvalidated.max_tokens or unvalidated.default_max_tokens or 1
        return max(1, model.context_length - reserved)
    if num_kept is not None and not 1 <= num_kept < model.context_length:
        message = f"must be -1, or between 1 and {model.context_length - 1}"
        raise check.invalid(Field.TRUNCATE_PROMPT_TOKENS, message)
    return num_kept


def _best_of(unvalidated: UnvalidatedRequest, n: int, check: FieldChecker) -> int:
    """How many sequences are generated, for the n that are sent."""
    best_of = check.integer(Field.BEST_OF, unvalidated.best_of, n, 1, MAX_SEQUENCES)
    if best_of < n:
        raise check.invalid(Field.BEST_OF, f"must be at least n, which is {n}")
    if best_of > n and unvalidated.response_mode is ResponseMode.STREAMED:
        # The best ones are known only when all have ended.
        raise check.invalid(Field.BEST_OF, f"must be n, which is {n}, where the answer is streamed")
    return best_of


def _beam_search(unvalidated: UnvalidatedRequest, n: int, check: FieldChecker) -> BeamSearchParams | None:
    search = unvalidated.beam_search
    if search is None:
        return None
    if unvalidated.response_mode is ResponseMode.STREAMED:
        raise check.invalid(Field.BEAM_SEARCH, "has nothing to stream before its end")
    sampling = unvalidated.sampling
    meaningless: dict[str, bool] = {
        **{
            one.path: sampling.get(one.name, one.in_beam_search[0]) not in one.in_beam_search for one in SAMPLING_FIELDS
        },
        Field.LOGIT_BIAS: len(unvalidated.logit_bias) > 0,
        Field.ALLOWED_TOKEN_IDS: len(unvalidated.allowed_token_ids) > 0,
        Field.BAD_WORDS: len(unvalidated.bad_words) > 0,
        Field.LOGPROB_TOKEN_IDS: len(unvalidated.logprob_token_ids) > 0,
        Field.PROMPT_LOGPROBS: unvalidated.prompt_logprobs is not None,
        Field.STOP: len(unvalidated.stop) > 0,
        Field.BEST_OF: unvalidated.best_of is not None,
    }
    for which, is_given in meaningless.items():
        if is_given:
            raise check.unsupported(which, "is not served in a beam search")
    width = check.integer(Field.BEAM_WIDTH, search.width, 0, 2, MAX_BEAMS)
    if n > width:
        raise check.invalid(Field.N, f"must be at most the width of the beam search, which is {width}")
    most = MAX_LENGTH_PENALTY
    return BeamSearchParams(
        width=width,
        length_penalty=check.number(Field.LENGTH_PENALTY, search.length_penalty, 1.0, -most, most),
        early_stopping=search.early_stopping or EarlyStopping.HEURISTIC,
    )


def _check_stops(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker) -> None:
    if len(unvalidated.stop) > MAX_STOPS:
        raise check.invalid(Field.STOP, f"must hold at most {MAX_STOPS} strings")
    for item_index, stop in enumerate(unvalidated.stop):
        where = check.field_path(Field.STOP, item_index)
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            message = f"must have between 1 and {MAX_STOP_LENGTH} characters"
            raise QuireError(Reason.INVALID_FIELD, message, field=where)
        check.unicode(where, stop)
    if len(unvalidated.stop_token_ids) > MAX_STOPS:
        raise check.invalid(Field.STOP_TOKEN_IDS, f"must hold at most {MAX_STOPS} ids")
    check.token_ids(Field.STOP_TOKEN_IDS, unvalidated.stop_token_ids, model)

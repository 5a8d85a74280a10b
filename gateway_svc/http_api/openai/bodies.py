"""Bodies of /v1/completions and /v1/chat/completions, as unvalidated requests and options of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from gateway_svc.field_paths import Field
from gateway_svc.http_api.calls import PromptRequest
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai import chat_fields
from gateway_svc.http_api.openai.answer_options import AnswerOptions
from gateway_svc.http_api.openai.chat_models import ChatBatchBody, ChatBody, ChatOptions, MessageBody
from gateway_svc.http_api.openai.choice_formats import TOOL_CALLS, CallFormat
from gateway_svc.http_api.openai.constraint_fields import read_constraint, refuse_beside_named_tool
from gateway_svc.http_api.openai.generation_body import CompletionBody, GenerationBody
from gateway_svc.http_api.openai.prompt_fields import read_prompts, read_retention
from gateway_svc.sampling_fields import SAMPLING_FIELDS, Value
from gateway_svc.unvalidated_request import (
    EndOfText,
    InfillPrompt,
    Prompt,
    ResponseMode,
    TextPrompt,
    TokenPrompt,
    UnvalidatedBeamSearch,
    UnvalidatedRequest,
)
from gateway_svc.validated_request import EarlyStopping, Echo, SpecialTokens, StopText, TruncationSide

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 1_024

_NAMES: Mapping[str, str] = {
    **chat_fields.NAMES,
    Field.TEXT: "prompt",
    Field.TOKEN_IDS: "prompt",
    Field.BEAM_SEARCH: "use_beam_search",
    Field.BEAM_WIDTH: "best_of",
}


class Delivery(Enum):
    """Options of the answer."""

    WHOLE = "whole"
    STREAM = "stream"
    STREAM_WITH_USAGE = "stream with usage"

    @property
    def response_mode(self) -> ResponseMode:
        """Whether the answer is streamed, for the validator."""
        return ResponseMode.WHOLE if self is Delivery.WHOLE else ResponseMode.STREAMED


@dataclass(frozen=True, slots=True)
class BodyFieldPath:
    """Fields as a body spells them; `names` has those that this body spells in its own way."""

    names: Mapping[str, str] = field(default_factory=dict)
    lone: frozenset[str] = frozenset()
    """Lists that this body has as one value."""

    def __call__(self, which: str, item_index: int | None = None) -> str:
        name = self.names[which] if which in self.names else _NAMES[which]
        return name if item_index is None or which in self.lone else f"{name}[{item_index}]"


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body's prompts in order, and the options of the answer."""

    prompts: list[PromptRequest]
    delivery: Delivery
    options: AnswerOptions
    calls: CallFormat = TOOL_CALLS
    echoed: str = ""
    """What answers begin with."""


def read_completion(body: CompletionBody, request_id: str | None) -> ReadBody:
    """The prompts of a body of /v1/completions. Raises QuireError."""
    unvalidated, field_path, delivery = _common(body, request_id)
    unvalidated = replace(unvalidated, logprobs=body.logprobs, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    own_names = dict(field_path.names)
    if body.echo:
        unvalidated = replace(unvalidated, echo=Echo.PRESENT)
        if body.prompt_logprobs is None and (body.logprobs is not None or body.logprob_token_ids):
            # The log-probabilities of the text are those of the prompt, too.
            unvalidated = replace(unvalidated, prompt_logprobs=body.logprobs or 0)
            own_names[Field.PROMPT_LOGPROBS] = "echo"
    prompts = []
    prompt: Prompt | None
    for prompt, name in read_prompts(
        "prompt", body.prompt, MAX_PROMPTS, add_special_tokens=body.add_special_tokens is not False
    ):
        names = {**own_names, Field.PROMPT: name, Field.TEXT: name, Field.TOKEN_IDS: name}
        if body.suffix and prompt is not None:
            prompt = _infill_prompt(prompt, body.suffix)
        prompts.append(PromptRequest(replace(unvalidated, prompt=prompt), replace(field_path, names=names)))
    return ReadBody(prompts, delivery, _options(body))


def _infill_prompt(prompt: TextPrompt | TokenPrompt, suffix: str) -> InfillPrompt:
    if isinstance(prompt, TokenPrompt):
        raise invalid("suffix", "needs a prompt that is a text")
    return InfillPrompt(prompt.text, suffix, prompt.add_special_tokens)


def read_chat_completion(body: ChatBody, request_id: str | None) -> ReadBody:
    """The prompt of a body of /v1/chat/completions. Raises QuireError."""
    return _chats(body, {"messages": body.messages}, request_id)


def read_chat_batch(body: ChatBatchBody, request_id: str | None) -> ReadBody:
    """The prompts of a body of /v1/chat/completions/batch. Raises QuireError."""
    chats = body.messages
    if not chats:
        raise invalid("messages", "must be given" if chats is None else "must hold at least one chat")
    if len(chats) > MAX_PROMPTS:
        raise invalid("messages", f"must hold at most {MAX_PROMPTS} chats")
    return _chats(body, {f"messages[{index}]": messages for index, messages in enumerate(chats)}, request_id)


def _chats(body: ChatOptions, chats: Mapping[str, Sequence[MessageBody] | None], request_id: str | None) -> ReadBody:
    """A body with one chat or several, by their paths."""
    unvalidated, field_path, delivery = _common(body, request_id)
    if body.logprobs:
        unvalidated = replace(unvalidated, logprobs=body.top_logprobs or 0)
    elif body.top_logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    prompts = []
    for path, chat in zip(chats, chat_fields.read_chats(body, chats), strict=True):
        own_names: dict[str, str] = {Field.PROMPT: path, Field.MESSAGES: path, Field.LOGPROBS: "top_logprobs"}
        names = {**field_path.names, **chat.names, **own_names}
        prompts.append(PromptRequest(replace(unvalidated, prompt=chat.prompt), replace(field_path, names=names)))
    if chat.calls.is_named:
        refuse_beside_named_tool(body)
    options = replace(_options(body), hides_reasoning=body.include_reasoning is False)
    return ReadBody(prompts, delivery, options, chat.calls, chat.last_answer if body.echo else "")


def _common(body: GenerationBody, request_id: str | None) -> tuple[UnvalidatedRequest, BodyFieldPath, Delivery]:
    """The fields of both bodies."""
    delivery = _delivery(body)
    if body.allowed_token_ids == []:
        raise invalid("allowed_token_ids", "must hold at least one id")
    if body.prompt_logprobs is not None and delivery is not Delivery.WHOLE:
        raise invalid("prompt_logprobs", "is not streamed")
    names: dict[str, str] = {}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        names[Field.MAX_TOKENS] = "max_completion_tokens"
    # As in vLLM: the width of a beam search is best_of, or else n.
    if body.best_of is None:
        names[Field.BEAM_WIDTH] = "n"
    beam_search = _beam_search(body, body.n if body.best_of is None else body.best_of)
    constrained = read_constraint(body)
    if constrained is not None:
        names |= constrained.names
    stop = body.stop
    unvalidated = UnvalidatedRequest(
        model=body.model,
        sampling=_sampling(body),
        seed=body.seed,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=body.allowed_token_ids or [],
        bad_words=body.bad_words or [],
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=[stop] if isinstance(stop, str) else stop or [],
        stop_token_ids=body.stop_token_ids or [],
        end_of_text=EndOfText.IGNORED if body.ignore_eos else EndOfText.ENDS,
        stop_text=StopText.INCLUDED if body.include_stop_str_in_output else StopText.EXCLUDED,
        n=body.n,
        best_of=body.best_of if beam_search is None else None,
        beam_search=beam_search,
        constraint=constrained.constraint if constrained is not None else None,
        logprob_token_ids=body.logprob_token_ids or [],
        prompt_logprobs=body.prompt_logprobs,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=TruncationSide(body.truncation_side or "left"),
        request_id=request_id,
        priority=body.priority,
        retention=read_retention(body.retention),
        cache_salt=body.cache_salt,
        special_tokens=SpecialTokens.of(
            is_kept=body.skip_special_tokens is False, has_spaces=body.spaces_between_special_tokens is not False
        ),
        response_mode=delivery.response_mode,
    )
    lone = frozenset[str]({Field.STOP}) if isinstance(stop, str) else frozenset[str]()
    return unvalidated, BodyFieldPath(names, lone), delivery


def _sampling(body: GenerationBody) -> dict[str, Value]:
    values = {one.name: getattr(body, one.name) for one in SAMPLING_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _beam_search(body: GenerationBody, width: int | None) -> UnvalidatedBeamSearch | None:
    """The beam search, whose width is in another field."""
    early_stopping = None if body.early_stopping is None else _EARLY_STOPPINGS[body.early_stopping]
    if body.use_beam_search:
        return UnvalidatedBeamSearch(1 if width is None else width, body.length_penalty, early_stopping)
    if body.length_penalty not in (None, 1):
        raise invalid("length_penalty", "needs use_beam_search to be true")
    if early_stopping not in (None, EarlyStopping.HEURISTIC):
        raise invalid("early_stopping", "needs use_beam_search to be true")
    return None


_EARLY_STOPPINGS: Mapping[bool | str, EarlyStopping] = {
    False: EarlyStopping.HEURISTIC,
    True: EarlyStopping.AT_WIDTH,
    "never": EarlyStopping.NEVER,
}


def _options(body: GenerationBody) -> AnswerOptions:
    stream = body.stream_options
    return AnswerOptions(
        has_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=body.return_tokens_as_token_ids,
        # As in vLLM.
        has_running_usage=stream is not None and bool(stream.include_usage and stream.continuous_usage_stats),
        service_tier=None if body.service_tier is None else "default",
    )


def _delivery(body: GenerationBody) -> Delivery:
    options = body.stream_options
    if options is None:
        return Delivery.STREAM if body.stream else Delivery.WHOLE
    if not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    return Delivery.STREAM_WITH_USAGE if options.include_usage else Delivery.STREAM

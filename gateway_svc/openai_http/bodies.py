"""Bodies of /v1/completions and /v1/chat/completions, as unvalidated requests and options of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from gateway_svc.field_paths import Field
from gateway_svc.openai_http import chat_fields, unsupported_fields
from gateway_svc.openai_http.constraint_fields import read_constraint
from gateway_svc.openai_http.json_fields import (
    JsonBody,
    JsonFields,
    as_integers,
    as_list,
    as_number,
    as_string,
    invalid,
)
from gateway_svc.openai_http.responses import TOOL_CALLS, CallFormat
from gateway_svc.retention import NONE, UNTIL_END, Retention
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.unvalidated_request import (
    EndOfText,
    Prompt,
    ResponseMode,
    TextPrompt,
    TokenPrompt,
    UnvalidatedBeamSearch,
    UnvalidatedRequest,
)
from gateway_svc.validated_request import EarlyStopping, SpecialTokens, StopText

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 1_024

_NAMES: Mapping[str, str] = {
    Field.MODEL: "model",
    Field.PROMPT: "prompt",
    Field.TEXT: "prompt",
    Field.TOKEN_IDS: "prompt",
    **chat_fields.NAMES,
    **{one.path: one.name for one in SAMPLING_FIELDS},
    Field.SEED: "seed",
    Field.LOGIT_BIAS: "logit_bias",
    Field.MAX_TOKENS: "max_tokens",
    Field.MIN_TOKENS: "min_tokens",
    Field.IGNORE_EOS: "ignore_eos",
    Field.STOP: "stop",
    Field.STOP_TOKEN_IDS: "stop_token_ids",
    Field.N: "n",
    Field.BEST_OF: "best_of",
    Field.BEAM_SEARCH: "use_beam_search",
    Field.BEAM_WIDTH: "best_of",
    Field.LENGTH_PENALTY: "length_penalty",
    Field.EARLY_STOPPING: "early_stopping",
    Field.LOGPROBS: "logprobs",
    Field.REQUEST_ID: "Idempotency-Key",
    Field.PRIORITY: "priority",
    Field.RETENTION: "retention",
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
class PromptRequest:
    """One prompt of a body."""

    unvalidated: UnvalidatedRequest
    field_path: BodyFieldPath


@dataclass(frozen=True, slots=True)
class Body:
    """A body's prompts in order, and the options of the answer."""

    prompts: list[PromptRequest]
    delivery: Delivery
    calls: CallFormat = TOOL_CALLS


def completion_body(body: JsonBody, request_id: str | None) -> Body:
    """Reads a body of /v1/completions. Raises QuireError."""
    fields = JsonFields(body.values)
    fields.reject_unsupported(unsupported_fields.COMPLETION)
    unvalidated, field_path, delivery = _common(fields, request_id)
    if fields.has("logprobs"):
        unvalidated = replace(unvalidated, logprobs=fields.integer("logprobs"))
    unvalidated = replace(unvalidated, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    prompts = []
    for prompt, name in _prompts(fields.raw("prompt")):
        names = {**field_path.names, Field.PROMPT: name, Field.TEXT: name, Field.TOKEN_IDS: name}
        prompts.append(PromptRequest(replace(unvalidated, prompt=prompt), replace(field_path, names=names)))
    body.reject_non_finite()
    return Body(prompts, delivery)


def chat_body(body: JsonBody, request_id: str | None) -> Body:
    """Reads a body of /v1/chat/completions. Raises QuireError."""
    fields = JsonFields(body.values)
    fields.reject_unsupported(unsupported_fields.CHAT)
    unvalidated, field_path, delivery = _common(fields, request_id)
    top_logprobs = fields.integer("top_logprobs")
    if fields.flag("logprobs"):
        unvalidated = replace(unvalidated, logprobs=top_logprobs or 0)
    elif top_logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    chat = chat_fields.read_chat(fields)
    names = {**field_path.names, **chat.names, Field.PROMPT: "messages", Field.LOGPROBS: "top_logprobs"}
    body.reject_non_finite()
    prompts = [PromptRequest(replace(unvalidated, prompt=chat.prompt), replace(field_path, names=names))]
    return Body(prompts, delivery, chat.calls)


def _common(fields: JsonFields, request_id: str | None) -> tuple[UnvalidatedRequest, BodyFieldPath, Delivery]:
    """The fields of both bodies."""
    delivery = _delivery(fields)
    names: dict[str, str] = {}
    max_tokens = fields.integer("max_tokens")
    if fields.has("max_completion_tokens"):
        max_tokens = fields.integer("max_completion_tokens")
        names[Field.MAX_TOKENS] = "max_completion_tokens"
    n, best_of = fields.integer("n"), fields.integer("best_of")
    # As in vLLM: the width of a beam search is best_of, or else n.
    if best_of is None:
        names[Field.BEAM_WIDTH] = "n"
    beam_search = _beam_search(fields, n if best_of is None else best_of)
    constrained = read_constraint(fields)
    if constrained is not None:
        names |= constrained.names
    stop = fields.raw("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else as_list("stop", stop)
    hidden = not fields.has("skip_special_tokens") or fields.flag("skip_special_tokens")
    unvalidated = UnvalidatedRequest(
        model=fields.string("model"),
        sampling=fields.sampling(SAMPLING_FIELDS),
        seed=fields.integer("seed"),
        logit_bias=_logit_bias(fields),
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens"),
        stop=[as_string(f"stop[{item_index}]", item) for item_index, item in enumerate(stops)],
        stop_token_ids=fields.integers("stop_token_ids"),
        end_of_text=EndOfText.IGNORED if fields.flag("ignore_eos") else EndOfText.ENDS,
        stop_text=StopText.INCLUDED if fields.flag("include_stop_str_in_output") else StopText.EXCLUDED,
        n=n,
        best_of=best_of if beam_search is None else None,
        beam_search=beam_search,
        constraint=constrained.constraint if constrained is not None else None,
        request_id=request_id,
        priority=fields.integer("priority"),
        retention=_retention(fields.raw("retention")),
        special_tokens=SpecialTokens.HIDDEN if hidden else SpecialTokens.KEPT,
        response_mode=delivery.response_mode,
    )
    lone = frozenset[str]({Field.STOP}) if isinstance(stop, str) else frozenset[str]()
    return unvalidated, BodyFieldPath(names, lone), delivery


def _beam_search(fields: JsonFields, width: int | None) -> UnvalidatedBeamSearch | None:
    """The beam search, whose width is in another field."""
    length_penalty = fields.number("length_penalty")
    early_stopping = _early_stopping(fields.raw("early_stopping"))
    if fields.flag("use_beam_search"):
        return UnvalidatedBeamSearch(1 if width is None else width, length_penalty, early_stopping)
    if length_penalty not in (None, 1):
        raise invalid("length_penalty", "needs use_beam_search to be true")
    if early_stopping not in (None, EarlyStopping.HEURISTIC):
        raise invalid("early_stopping", "needs use_beam_search to be true")
    return None


def _early_stopping(value: Any) -> EarlyStopping | None:
    match value:
        case None:
            return None
        case False:
            return EarlyStopping.HEURISTIC
        case True:
            return EarlyStopping.AT_WIDTH
        case "never":
            return EarlyStopping.NEVER
    raise invalid("early_stopping", 'must be true, false or "never"')


def _retention(value: Any) -> Retention | None:
    match value:
        case None:
            return None
        case "none":
            return NONE
        case "until_end":
            return UNTIL_END
        case int() if value >= 1 and value is not True:
            return Retention(is_recorded=True, seconds=value)
    raise invalid("retention", 'must be "none", "until_end" or an integer of seconds, at least 1')


def _logit_bias(fields: JsonFields) -> dict[int, float]:
    biases = fields.object("logit_bias")
    read: dict[int, float] = {}
    for name, bias in biases.items() if biases is not None else ():
        where = "logit_bias"
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise invalid(where, "must have token ids as names")
        read[int(name)] = as_number(where, bias)
    return read


def _delivery(fields: JsonFields) -> Delivery:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return Delivery.STREAM if stream else Delivery.WHOLE
    if not stream:
        raise invalid("stream_options", "needs stream to be true")
    options.reject_unsupported(unsupported_fields.STREAM_OPTIONS)
    return Delivery.STREAM_WITH_USAGE if options.flag("include_usage") else Delivery.STREAM


def _prompts(prompt: Any) -> list[tuple[Prompt | None, str]]:
    """Prompts with the name of each: a string, token ids, or a list of either kind."""
    match prompt:
        case None:
            return [(None, "prompt")]
        case str():
            return [(TextPrompt(prompt), "prompt")]
        case []:
            return [(TokenPrompt([]), "prompt")]
        case [str() | list(), *_]:
            if len(prompt) > MAX_PROMPTS:
                raise invalid("prompt", f"must hold at most {MAX_PROMPTS} prompts")
            return [
                (_one_of_many(f"prompt[{item_index}]", one), f"prompt[{item_index}]")
                for item_index, one in enumerate(prompt)
            ]
        case [*_]:
            return [(TokenPrompt(as_integers("prompt", prompt)), "prompt")]
    raise invalid("prompt", "must be a string, a list of strings, token ids, or a list of those")


def _one_of_many(where: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    return TokenPrompt(as_integers(where, prompt))

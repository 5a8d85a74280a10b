"""A client's request in either protocol: typed values, not validated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Any

from google.protobuf.message import Message

from gateway_svc.chats import ChatPrompt
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.retention import Retention
from gateway_svc.sampling_fields import SAMPLING_FIELDS, Value
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.validated_request import EarlyStopping, Echo, SpecialTokens, StopText, TruncationSide
from quire.inference.v1 import inference_pb2
from svc_common.errors import QuireError, Reason


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue."""

    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens."""


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The texts before and after a gap that the answer fills."""

    before: str
    after: str
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens to continue."""

    token_ids: Sequence[int]


Prompt = TextPrompt | InfillPrompt | TokenPrompt | ChatPrompt


class EndOfText(StrEnum):
    """Whether the model's end-of-text token ends a sequence."""

    ENDS = "ends"
    IGNORED = "ignored"


class MaxTokensRange(Enum):
    """The highest max_tokens that is not refused. One that is higher than what the prompt leaves of the context is
    limited by that."""

    ROOM = auto()
    """What the prompt leaves of the context."""
    CONTEXT = auto()
    """The length of the context."""
    UNLIMITED = auto()


class ResponseMode(StrEnum):
    """Whether the answer is streamed."""

    WHOLE = "whole"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class UnvalidatedBeamSearch:
    """A beam search, before validation. Absent fields are None."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None

    @classmethod
    def from_proto(cls, search: inference_pb2.BeamSearch) -> "UnvalidatedBeamSearch":
        """From the public contract. Raises QuireError for a field or value that this version of it does not have."""
        reject_unknown_fields(search, "generation.beam_search")
        if search.early_stopping not in _EARLY_STOPPINGS:
            where = f"generation.{Field.EARLY_STOPPING}"
            raise QuireError(Reason.INVALID_FIELD, "is not one of the values of EarlyStopping", field=where)
        return cls(
            width=search.width,
            length_penalty=present(search, "length_penalty"),
            early_stopping=_EARLY_STOPPINGS[search.early_stopping],
        )


_SIDES = {
    inference_pb2.TRUNCATION_SIDE_UNSPECIFIED: None,
    inference_pb2.TRUNCATION_SIDE_LEFT: TruncationSide.LEFT,
    inference_pb2.TRUNCATION_SIDE_RIGHT: TruncationSide.RIGHT,
}


def side_from_proto(side: inference_pb2.TruncationSide, where: str) -> TruncationSide | None:
    """The value of a field; None: it is not specified. Raises QuireError, which names the field `where`."""
    if side not in _SIDES:
        raise QuireError(Reason.INVALID_FIELD, "is not one of the values of TruncationSide", field=where)
    return _SIDES[side]


_EARLY_STOPPINGS = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: None,
    inference_pb2.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    inference_pb2.EARLY_STOPPING_AT_WIDTH: EarlyStopping.AT_WIDTH,
    inference_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


@dataclass(frozen=True, slots=True)
class UnvalidatedRequest:
    """A request to generate, before validation. Absent fields are None."""

    prompt: Prompt | None = None
    model: str | None = None
    sampling: Mapping[str, Value] = field(default_factory=dict)
    """By name of `SAMPLING_FIELDS`, without absent ones."""
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    """The value of an absent max_tokens, limited by the context; None: the rest of the context."""
    max_tokens_range: MaxTokensRange = MaxTokensRange.CONTEXT
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    end_of_text: EndOfText = EndOfText.ENDS
    stop_text: StopText = StopText.EXCLUDED
    n: int | None = None
    best_of: int | None = None
    beam_search: UnvalidatedBeamSearch | None = None
    constraint: UnvalidatedConstraint | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    echo: Echo = Echo.ABSENT
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = TruncationSide.LEFT
    request_id: str | None = None
    priority: int | None = None
    retention: Retention | None = None
    cache_salt: str | None = None
    special_tokens: SpecialTokens = SpecialTokens.HIDDEN
    response_mode: ResponseMode = ResponseMode.WHOLE

    @property
    def omits_output(self) -> bool:
        """Whether only the prompt is returned."""
        return self.max_tokens == 0

    @classmethod
    def from_proto(cls, generation: inference_pb2.Generation, response_mode: ResponseMode) -> "UnvalidatedRequest":
        """From the public contract. Raises QuireError for a field that this version of it does not have."""
        sampling, stopping = generation.sampling, generation.stopping
        for path, message in (("", generation), (".sampling", sampling), (".stopping", stopping)):
            reject_unknown_fields(message, f"generation{path}")
        return cls(
            prompt=_prompt_from_proto(generation),
            model=present(generation, "model"),
            sampling={one.name: getattr(sampling, one.name) for one in SAMPLING_FIELDS if sampling.HasField(one.name)},
            seed=present(sampling, "seed"),
            logit_bias=sampling.logit_bias,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=sampling.bad_words,
            max_tokens=present(stopping, "max_tokens"),
            min_tokens=present(stopping, "min_tokens"),
            stop=stopping.stop,
            stop_token_ids=stopping.stop_token_ids,
            end_of_text=EndOfText.IGNORED if stopping.ignore_eos else EndOfText.ENDS,
            stop_text=StopText.INCLUDED if stopping.include_stop else StopText.EXCLUDED,
            n=present(generation, "n"),
            best_of=present(generation, "best_of"),
            beam_search=(
                UnvalidatedBeamSearch.from_proto(generation.beam_search) if generation.HasField("beam_search") else None
            ),
            constraint=_constraint_from_proto(generation.constraint) if generation.HasField("constraint") else None,
            logprobs=present(generation, "logprobs"),
            logprob_token_ids=generation.logprob_token_ids,
            prompt_logprobs=present(generation, "prompt_logprobs"),
            echo=Echo.PRESENT if generation.echo else Echo.ABSENT,
            truncate_prompt_tokens=present(generation, "truncate_prompt_tokens"),
            truncation_side=side_from_proto(generation.truncation_side, f"generation.{Field.TRUNCATION_SIDE}")
            or TruncationSide.LEFT,
            request_id=present(generation, "request_id"),
            priority=present(generation, "priority"),
            retention=retention_from_proto(generation, "generation.retention"),
            special_tokens=SpecialTokens.of(
                is_kept=generation.keep_special_tokens,
                has_spaces=present(generation, "spaces_between_special_tokens") is not False,
            ),
            response_mode=response_mode,
        )


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The operator's defaults of absent fields. A field that is not here has Quire's own default."""

    sampling: Mapping[str, Value] = field(default_factory=dict)
    """By the names of `SAMPLING_FIELDS`."""
    max_tokens: int | None = None

    def fill(self, unvalidated: UnvalidatedRequest) -> UnvalidatedRequest:
        """The request with these values in its absent fields. A beam search does not sample: it gets max_tokens."""
        filled: dict[str, Any] = {}
        if unvalidated.beam_search is None and self.sampling.keys() - unvalidated.sampling.keys():
            filled["sampling"] = {**self.sampling, **unvalidated.sampling}
        if self.max_tokens is not None:
            filled["default_max_tokens"] = self.max_tokens
        return replace(unvalidated, **filled) if filled else unvalidated


def retention_from_proto(
    message: inference_pb2.Generation
    | inference_pb2.EmbedRequest
    | inference_pb2.ClassifyRequest
    | inference_pb2.ScoreRequest,
    where: str,
) -> Retention | None:
    """The retention of a message; None: it has none. Raises QuireError, which names the field `where`."""
    if not message.HasField("retention"):
        return None
    reject_unknown_fields(message.retention, where)
    retention = Retention.from_proto(message.retention)
    if retention is None:
        raise QuireError(Reason.INVALID_FIELD, "must be none, until_end, or at least 1 second", field=where)
    return retention


def _constraint_from_proto(message: inference_pb2.Constraint) -> UnvalidatedConstraint:
    where = "generation.constraint"
    for part, path in (
        (message, where),
        (message.json_object, f"{where}.json_object"),
        (message.choice, f"{where}.choice"),
    ):
        reject_unknown_fields(part, path)
    match message.WhichOneof("kind"):
        case "json_schema":
            return UnvalidatedConstraint(Field.JSON_SCHEMA, message.json_schema)
        case "json_object":
            return UnvalidatedConstraint(Field.JSON_OBJECT)
        case "regex":
            return UnvalidatedConstraint(Field.REGEX, message.regex)
        case "grammar":
            return UnvalidatedConstraint(Field.GRAMMAR, message.grammar)
        case "gbnf":
            return UnvalidatedConstraint(Field.GBNF, message.gbnf)
        case "choice":
            return UnvalidatedConstraint(Field.CHOICE, choices=tuple(message.choice.choices))
    raise QuireError(Reason.INVALID_FIELD, "must have one kind of constraint", field=where)


def _prompt_from_proto(generation: inference_pb2.Generation) -> Prompt | None:
    match generation.WhichOneof("prompt"):
        case "text":
            return TextPrompt(generation.text)
        case "token_ids":
            return TokenPrompt(generation.token_ids.ids)
        case "chat":
            return ChatPrompt.from_proto(generation.chat, "generation.chat")
    return None


def present(message: Message, name: str) -> Any:
    """The value of an optional field, or None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None

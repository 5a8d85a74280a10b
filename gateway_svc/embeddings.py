"""Calls for embeddings in either protocol, and how a vector is made."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from gateway_svc.field_paths import Field, FieldPath, NamedFields
from gateway_svc.retention import Retention
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.unvalidated_request import (
    TextPrompt,
    TokenPrompt,
    present,
    retention_from_proto,
    side_from_proto,
)
from gateway_svc.validated_request import TruncationSide
from quire.inference.v1 import inference_pb2
from quire.worker.v1 import worker_pb2
from svc_common.errors import QuireError, Reason

Vector: TypeAlias = "array[float]"
"""32-bit floats."""

MAX_INPUTS = 2_048
MAX_DIMENSIONS = 65_536

MAX_TEXT_TOKENS = "max_text_tokens"
"""The field of an input that limits its text: each protocol has names of its own."""

DIMENSIONS = "dimensions"


class Pooling(Enum):
    """How the hidden states of an input's tokens become one vector."""

    OF_MODEL = worker_pb2.POOLING_UNSPECIFIED
    """As the model's files say."""
    MEAN = worker_pb2.POOLING_MEAN
    CLS = worker_pb2.POOLING_CLS
    LAST = worker_pb2.POOLING_LAST


class Normalization(Enum):
    """What is done with the numbers of a vector."""

    OF_MODEL = worker_pb2.NORMALIZATION_UNSPECIFIED
    """What the model's files say."""
    NONE = worker_pb2.NORMALIZATION_NONE
    L2 = worker_pb2.NORMALIZATION_L2

    @classmethod
    def of(cls, normalize: bool | None) -> "Normalization":
        """From a flag that a request may leave out."""
        if normalize is None:
            return cls.OF_MODEL
        return cls.L2 if normalize else cls.NONE


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One input of a call. `field_path` has its fields as the client spells them."""

    prompt: TextPrompt | TokenPrompt | None
    field_path: FieldPath
    max_text_tokens: int | None = None
    """A text is cut to so many tokens, not counting the special ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnvalidatedInputs:
    """A call for a value of each input, before validation. Absent fields are None. `field_path` names the fields of all
    inputs.
    """

    inputs: Sequence[EmbeddingInput]
    field_path: FieldPath
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = TruncationSide.RIGHT
    priority: int | None = None
    retention: Retention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnvalidatedEmbeddings(UnvalidatedInputs):
    """A call for embeddings, before validation."""

    dimensions: int | None = None
    pooling: Pooling = Pooling.OF_MODEL
    normalization: Normalization = Normalization.OF_MODEL

    @classmethod
    def from_proto(cls, request: inference_pb2.EmbedRequest) -> "UnvalidatedEmbeddings":
        """From the public contract. Raises QuireError for a field or value that this version of it does not have."""
        reject_unknown_fields(request, "request")
        if request.pooling not in _POOLINGS:
            raise QuireError(Reason.INVALID_FIELD, "is not one of the values of Pooling", field="pooling")
        return cls(
            inputs=inputs_from_proto(request),
            field_path=NamedFields({Field.PROMPT: "inputs"}),
            model=present(request, "model"),
            dimensions=present(request, "dimensions"),
            pooling=_POOLINGS[request.pooling],
            normalization=Normalization.of(present(request, "normalize")),
            truncate_prompt_tokens=present(request, "truncate_prompt_tokens"),
            truncation_side=side_from_proto(request.truncation_side, Field.TRUNCATION_SIDE) or TruncationSide.RIGHT,
            priority=present(request, "priority"),
            retention=retention_from_proto(request, Field.RETENTION),
        )


_POOLINGS = {
    inference_pb2.POOLING_UNSPECIFIED: Pooling.OF_MODEL,
    inference_pb2.POOLING_MEAN: Pooling.MEAN,
    inference_pb2.POOLING_CLS: Pooling.CLS,
    inference_pb2.POOLING_LAST: Pooling.LAST,
}


def inputs_from_proto(request: inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest) -> list[EmbeddingInput]:
    """The inputs of a call. Raises QuireError for a field that this version of the contract does not have."""
    has_special = present(request, "add_special_tokens") is not False
    return [
        _input_from_proto(one, f"inputs[{item_index}]", add_special_tokens=has_special)
        # One more than is valid, so that too many are not read: a message may have millions.
        for item_index, one in enumerate(request.inputs[: MAX_INPUTS + 1])
    ]


def _input_from_proto(message: inference_pb2.EmbedInput, where: str, *, add_special_tokens: bool) -> EmbeddingInput:
    reject_unknown_fields(message, where)
    prompt: TextPrompt | TokenPrompt | None = None
    match message.WhichOneof("kind"):
        case "text":
            prompt = TextPrompt(message.text, add_special_tokens)
        case "token_ids":
            prompt = TokenPrompt(message.token_ids.ids)
    return EmbeddingInput(prompt, input_fields(where, f"{where}.text", f"{where}.token_ids.ids"))


def input_fields(whole: str, text: str, token_ids: str, others: Mapping[str, str] | None = None) -> FieldPath:
    """The fields of one input, by the names of the input, of its text and of its token ids, and by other names."""
    # The scheduler refuses a prompt that is too long by its max_tokens.
    names: dict[str, str] = {
        Field.PROMPT: whole,
        Field.MAX_TOKENS: whole,
        Field.TEXT: text,
        Field.TOKEN_IDS: token_ids,
    }
    return NamedFields(names | dict(others or {}))


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """How the vector of an input is made. Values are in range."""

    dimensions: int | None = None
    pooling: Pooling = Pooling.OF_MODEL
    normalization: Normalization = Normalization.OF_MODEL

    def to_proto(self) -> worker_pb2.ResultKind:
        """The kind of result."""
        embedding = worker_pb2.EmbeddingResult(
            pooling=self.pooling.value,
            num_dimensions=self.dimensions or 0,
            normalization=self.normalization.value,
        )
        return worker_pb2.ResultKind(embedding=embedding)

    def check(self, value: Vector, field_path: FieldPath) -> QuireError | None:
        """The error of an input that asks for more dimensions than the vectors of the model have."""
        # Only workers know how many these are.
        if self.dimensions is None or len(value) >= self.dimensions:
            return None
        message = f"must be at most {len(value)}, which the vectors of this model have"
        return QuireError(Reason.INVALID_FIELD, message, field=field_path(DIMENSIONS))

"""The inputs of calls whose results are values, such as vectors, in either protocol."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from gateway_svc.field_paths import Field, FieldPath, NamedFields
from gateway_svc.retention import Retention
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.unvalidated_request import TextPrompt, TokenPrompt, present, retention_from_proto, side_from_proto
from gateway_svc.validated_request import TruncationSide
from quire.inference.v1 import inference_pb2

Vector: TypeAlias = "array[float]"
"""32-bit floats."""

MAX_INPUTS = 2_048
MAX_TEXT_TOKENS = "max_text_tokens"
"""The field of an input that limits its text: each protocol has names of its own."""


@dataclass(frozen=True, slots=True)
class ValueInput:
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

    inputs: Sequence[ValueInput]
    field_path: FieldPath
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = TruncationSide.RIGHT
    priority: int | None = None
    retention: Retention | None = None


class InputOptions(TypedDict):
    """The fields of UnvalidatedInputs."""

    inputs: Sequence[ValueInput]
    field_path: FieldPath
    model: str | None
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide
    priority: int | None
    retention: Retention | None


def options_from_proto(request: inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest) -> InputOptions:
    """From the public contract. Raises QuireError for a field or value that this version of it does not have."""
    has_special = present(request, "add_special_tokens") is not False
    return {
        "inputs": [
            _input_from_proto(one, f"inputs[{item_index}]", add_special_tokens=has_special)
            # One more than is valid, so that too many are not read: a message may have millions.
            for item_index, one in enumerate(request.inputs[: MAX_INPUTS + 1])
        ],
        "field_path": NamedFields({Field.PROMPT: "inputs"}),
        "model": present(request, "model"),
        "truncate_prompt_tokens": present(request, "truncate_prompt_tokens"),
        "truncation_side": side_from_proto(request.truncation_side, Field.TRUNCATION_SIDE) or TruncationSide.RIGHT,
        "priority": present(request, "priority"),
        "retention": retention_from_proto(request, Field.RETENTION),
    }


def _input_from_proto(message: inference_pb2.EmbedInput, where: str, *, add_special_tokens: bool) -> ValueInput:
    reject_unknown_fields(message, where)
    prompt: TextPrompt | TokenPrompt | None = None
    match message.WhichOneof("kind"):
        case "text":
            prompt = TextPrompt(message.text, add_special_tokens)
        case "token_ids":
            prompt = TokenPrompt(message.token_ids.ids)
    return ValueInput(prompt, input_fields(where, f"{where}.text", f"{where}.token_ids.ids"))


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

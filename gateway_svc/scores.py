"""Calls for scores of pairs of texts in either protocol, and how a score is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway_svc.embeddings import UnvalidatedEmbeddings
from gateway_svc.field_paths import Field, FieldPath, NamedFields
from gateway_svc.request_errors import internal
from gateway_svc.retention import Retention
from gateway_svc.similarity import InputPairs
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.unvalidated_request import TextPrompt, present, retention_from_proto, side_from_proto
from gateway_svc.validated_request import TruncationSide
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.value_inputs import MAX_TEXT_TOKENS, ValueInput, Vector, input_fields
from quire.inference.v1 import inference_pb2
from quire.worker.v1 import worker_pb2
from svc_common.errors import QuireError, Reason

MAX_TEXTS = 1_024
"""Of each side of the pairs of a call."""


@dataclass(frozen=True, slots=True)
class UnvalidatedScores:
    """A call for scores, before validation. Absent fields are None. `field_path` names the fields of all pairs."""

    pairs: InputPairs
    field_path: FieldPath
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = TruncationSide.RIGHT
    is_raw: bool = False
    """Whether a cross-encoder's scores are its outputs without its activation function."""
    priority: int | None = None
    retention: Retention | None = None
    instruction: str | None = None
    """Of models whose chat template writes pairs, in place of that of their files."""

    @classmethod
    def from_proto(cls, request: inference_pb2.ScoreRequest) -> "UnvalidatedScores":
        """From the public contract. Raises QuireError for a field or value that this version of it does not have, and
        for sides that make no pairs.
        """
        reject_unknown_fields(request, "request")
        sides = []
        for side, limit in (("queries", "max_tokens_per_query"), ("documents", "max_tokens_per_document")):
            # One more than is valid, so that too many are not read: a message may have millions.
            texts, most = getattr(request, side)[: MAX_TEXTS + 1], present(request, limit)
            where = [f"{side}[{item_index}]" for item_index in range(len(texts))]
            sides.append(text_inputs(side, texts, where, limit, most))
        return cls(
            pairs=pair_inputs("queries", "documents", *sides),
            field_path=NamedFields({Field.PROMPT: "documents"}),
            model=present(request, "model"),
            truncate_prompt_tokens=present(request, "truncate_prompt_tokens"),
            truncation_side=side_from_proto(request.truncation_side, Field.TRUNCATION_SIDE) or TruncationSide.RIGHT,
            is_raw=request.raw_scores,
            priority=present(request, "priority"),
            retention=retention_from_proto(request, Field.RETENTION),
            instruction=present(request, "instruction"),
        )

    @property
    def embeddings(self) -> UnvalidatedEmbeddings:
        """The call for the embeddings of all texts, which a model that computes embeddings needs."""
        return UnvalidatedEmbeddings(
            inputs=self.pairs.inputs,
            field_path=self.field_path,
            model=self.model,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            priority=self.priority,
            retention=self.retention,
        )


def text_inputs(
    side: str, texts: Sequence[str], where: Sequence[str], limit_field: str, max_tokens: int | None
) -> list[ValueInput]:
    """The texts of one side of the pairs, with the field of each. Raises QuireError for too few or too many."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise QuireError(Reason.INVALID_FIELD, f"must hold 1 to {MAX_TEXTS} texts", field=side)
    return [
        ValueInput(TextPrompt(text), input_fields(one, one, one, {MAX_TEXT_TOKENS: limit_field}), max_tokens)
        for text, one in zip(texts, where, strict=True)
    ]


def pair_inputs(first: str, second: str, firsts: Sequence[ValueInput], seconds: Sequence[ValueInput]) -> InputPairs:
    """The pairs of two sides, of these fields. Raises QuireError unless one is paired with all, or each with one."""
    if len(firsts) not in (1, len(seconds)):
        raise QuireError(Reason.INVALID_FIELD, f"must be one text, or as many as {second}", field=first)
    return InputPairs.of(firsts, seconds)


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """How the score of a pair is made by a cross-encoder."""

    num_first_tokens: int
    """How many tokens are of the first token type."""
    is_raw: bool

    def to_proto(self) -> worker_pb2.ResultKind:
        """The kind of result."""
        score = worker_pb2.ScoreResult(num_first_tokens=self.num_first_tokens, is_raw=self.is_raw)
        return worker_pb2.ResultKind(score=score)

    def check(self, value: Vector, field_path: FieldPath) -> QuireError | None:
        """The error of a model with several classes."""
        return None if len(value) == 1 else internal("the result is not a score")


@dataclass(frozen=True, slots=True)
class ValidatedScores:
    """A call for scores, for the scheduler, and how the values of its requests become scores."""

    requests: Sequence[ValidatedValue]
    places: Sequence[tuple[int, ...]]
    """For each pair, the places of its requests: one of the pair, or one of each text."""
    read: Callable[[Sequence[Vector]], list[float]]
    """The scores of all pairs, in their order, given the values of the requests."""

    def num_numbers(self, values: Sequence[Vector]) -> int:
        """How many numbers `read` takes to make scores of values: each pair takes those of both its texts."""
        return sum(map(len, values)) + sum(len(values[place]) for of_pair in self.places for place in of_pair)

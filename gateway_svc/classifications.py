"""Calls for classifications in either protocol, and how the numbers of an input are made."""

from dataclasses import dataclass

from gateway_svc.embeddings import UnvalidatedInputs, Vector, inputs_from_proto
from gateway_svc.field_paths import Field, FieldPath, NamedFields
from gateway_svc.request_errors import internal
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.unvalidated_request import present, retention_from_proto, side_from_proto
from gateway_svc.validated_request import TruncationSide
from quire.inference.v1 import inference_pb2
from quire.worker.v1 import worker_pb2
from svc_common.errors import QuireError


@dataclass(frozen=True, slots=True, kw_only=True)
class UnvalidatedClassifications(UnvalidatedInputs):
    """A call for classifications, before validation."""

    is_raw: bool = False
    """Whether the numbers are the head's output without its activation function."""

    @classmethod
    def from_proto(cls, request: inference_pb2.ClassifyRequest) -> "UnvalidatedClassifications":
        """From the public contract. Raises QuireError for a field or value that this version of it does not have."""
        reject_unknown_fields(request, "request")
        return cls(
            inputs=inputs_from_proto(request),
            field_path=NamedFields({Field.PROMPT: "inputs"}),
            model=present(request, "model"),
            truncate_prompt_tokens=present(request, "truncate_prompt_tokens"),
            truncation_side=side_from_proto(request.truncation_side, Field.TRUNCATION_SIDE) or TruncationSide.RIGHT,
            is_raw=request.raw_scores,
            priority=present(request, "priority"),
            retention=retention_from_proto(request, Field.RETENTION),
        )


@dataclass(frozen=True, slots=True)
class ClassificationParams:
    """How the numbers of an input are made."""

    num_labels: int
    is_raw: bool

    def to_proto(self) -> worker_pb2.ResultKind:
        """The kind of result."""
        return worker_pb2.ResultKind(score=worker_pb2.ScoreResult(is_raw=self.is_raw))

    def check(self, value: Vector, field_path: FieldPath) -> QuireError | None:
        """The error of a worker whose model has other labels."""
        return None if len(value) == self.num_labels else internal("the result has not a number for each label")

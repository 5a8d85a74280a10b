"""Calls for classifications in either protocol, and how the numbers of an input are made."""

from dataclasses import dataclass

from gateway_svc.field_paths import FieldPath
from gateway_svc.request_errors import internal
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.value_inputs import UnvalidatedInputs, Vector, options_from_proto
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
        return cls(**options_from_proto(request), is_raw=request.raw_scores)


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

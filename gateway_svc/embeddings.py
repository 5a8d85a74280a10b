"""Calls for embeddings in either protocol, and how a vector is made."""

from dataclasses import dataclass
from enum import Enum

from gateway_svc.field_paths import FieldPath
from gateway_svc.unknown_fields import reject_unknown_fields
from gateway_svc.unvalidated_request import (
    present,
)
from gateway_svc.value_inputs import UnvalidatedInputs, Vector, options_from_proto
from quire.inference.v1 import inference_pb2
from quire.worker.v1 import worker_pb2
from svc_common.errors import QuireError, Reason

MAX_DIMENSIONS = 65_536

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
            **options_from_proto(request),
            dimensions=present(request, "dimensions"),
            pooling=_POOLINGS[request.pooling],
            normalization=Normalization.of(present(request, "normalize")),
        )


_POOLINGS = {
    inference_pb2.POOLING_UNSPECIFIED: Pooling.OF_MODEL,
    inference_pb2.POOLING_MEAN: Pooling.MEAN,
    inference_pb2.POOLING_CLS: Pooling.CLS,
    inference_pb2.POOLING_LAST: Pooling.LAST,
}


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

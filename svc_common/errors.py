"""Errors that clients see: one type, sent as a gRPC status with google.rpc details or over HTTP."""

from dataclasses import dataclass
from enum import StrEnum

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from svc_common.durations import to_duration

DOMAIN = "quire"


class Reason(StrEnum):
    """ErrorInfo.reason: the machine-readable cause. Values are never renamed."""

    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    INVALID_FIELD = "INVALID_FIELD"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED"
    GRAMMAR_INVALID = "GRAMMAR_INVALID"
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_NOT_READY = "MODEL_NOT_READY"
    NOT_FOUND = "NOT_FOUND"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    CAPACITY_EXHAUSTED = "CAPACITY_EXHAUSTED"
    TENANT_QUOTA_EXCEEDED = "TENANT_QUOTA_EXCEEDED"
    DEADLINE_TOO_SHORT = "DEADLINE_TOO_SHORT"
    DRAINING = "DRAINING"
    RESUME_OFFSET_INVALID = "RESUME_OFFSET_INVALID"
    REQUEST_UNKNOWN = "REQUEST_UNKNOWN"
    REQUEST_QUARANTINED = "REQUEST_QUARANTINED"
    REQUEST_LOST = "REQUEST_LOST"
    STORE_DEGRADED = "STORE_DEGRADED"
    NOT_LEADER = "NOT_LEADER"
    PROTOCOL_UNSUPPORTED = "PROTOCOL_UNSUPPORTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


_CODES: dict[Reason, grpc.StatusCode] = {
    Reason.MALFORMED_MESSAGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.FEATURE_UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.GRAMMAR_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.GRAMMAR_TOO_COMPLEX: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.MODEL_NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.IDEMPOTENCY_KEY_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.CAPACITY_EXHAUSTED: grpc.StatusCode.UNAVAILABLE,
    Reason.TENANT_QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE_TOO_SHORT: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.RESUME_OFFSET_INVALID: grpc.StatusCode.OUT_OF_RANGE,
    Reason.REQUEST_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    # Not the client's fault, and not to be retried: another run could crash more workers.
    Reason.REQUEST_QUARANTINED: grpc.StatusCode.INTERNAL,
    Reason.REQUEST_LOST: grpc.StatusCode.DATA_LOSS,
    Reason.STORE_DEGRADED: grpc.StatusCode.UNAVAILABLE,
    Reason.NOT_LEADER: grpc.StatusCode.UNAVAILABLE,
    Reason.PROTOCOL_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass(eq=False)
class QuireError(Exception):
    """A rejection or failure that is sent to the client unchanged: it has no prompt, output or exception text.

    `field` is the path of the field at fault as the client wrote it ("sampling.top_p", "messages[0].role").
    `retry_after` is in seconds. `subject` names the exceeded quota ("tenant:search").
    """

    reason: Reason
    message: str
    field: str | None = None
    retry_after: float | None = None
    subject: str | None = None

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code of this reason."""
        return _CODES[self.reason]

    def details(self) -> bytes:
        """The serialized google.rpc.Status that travels in `grpc-status-details-bin`."""
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=str(self))
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self.reason.value, domain=DOMAIN))
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.subject is not None:
            excess = error_details_pb2.QuotaFailure.Violation(subject=self.subject, description=self.message)
            status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[excess]))
        if self.retry_after is not None:
            retry = error_details_pb2.RetryInfo(retry_delay=to_duration(self.retry_after))
            status.details.add().Pack(retry)
        data: bytes = status.SerializeToString()
        return data

    async def abort(self, context: grpc.aio.ServicerContext, request_id: str) -> None:  # type: ignore[type-arg]
        """Ends the call with this error. Raises grpc's exception, which leaves the handler."""
        metadata = ((rpc_status.GRPC_DETAILS_METADATA_KEY, self.details()), ("x-request-id", request_id))
        await context.abort(self.code, str(self), trailing_metadata=metadata)

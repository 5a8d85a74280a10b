"""Errors in OpenAI's format: an HTTP status and a body with message, type, param and code."""

import math
from dataclasses import dataclass
from typing import Any

import grpc

from svc_common.errors import QuireError, Reason

_BY_STATUS: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: (499, "cancelled"),
    grpc.StatusCode.INTERNAL: (500, "server_error"),
    grpc.StatusCode.DATA_LOSS: (500, "server_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout"),
}

_BY_REASON: dict[Reason, tuple[int, str]] = {Reason.MESSAGE_TOO_LARGE: (413, "invalid_request_error")}


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error response. `code` is the machine-readable reason, in lower case; `retry_after` is in seconds."""

    status: int
    kind: str
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None
    allow: str | None = None
    should_retry: str | None = None
    """"false" where a client would retry on its own, and fail again. OpenAI's clients obey it."""
    connection: str | None = None
    """"close" where another connection may lead to a gateway that can serve the request."""

    @classmethod
    def of(cls, error: QuireError) -> "HttpError":
        """A QuireError by the one table. Seconds to wait are rounded up to at least 1."""
        status, kind = _BY_REASON.get(error.reason) or _BY_STATUS[error.code]
        retry_after = None if error.retry_after is None else max(1, math.ceil(error.retry_after))
        in_vain = error.reason in (Reason.REQUEST_QUARANTINED, Reason.REQUEST_LOST) or (
            error.reason is Reason.DEADLINE_TOO_SHORT and retry_after is None
        )
        return cls(
            status=status,
            kind=kind,
            code=error.reason.value.lower(),
            message=str(error),
            param=error.field,
            retry_after=retry_after,
            should_retry="false" if in_vain else None,
            connection="close" if error.reason is Reason.DRAINING else None,
        )

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The error's own headers."""
        headers = {
            "retry-after": self.retry_after,
            "x-should-retry": self.should_retry,
            "allow": self.allow,
            "connection": self.connection,
        }
        return {name: str(value) for name, value in headers.items() if value is not None}


NO_ROUTE = HttpError(404, "invalid_request_error", "not_found", "there is nothing at this address")
WRONG_METHOD = HttpError(405, "invalid_request_error", "method_not_allowed", "this address takes another method")
LATE_BODY = HttpError(
    408, "invalid_request_error", "request_timeout", "the body did not come in time", connection="close"
)
NOT_JSON = HttpError(
    415, "invalid_request_error", "unsupported_media_type", "Content-Type must be application/json", "Content-Type"
)


class HttpRejection(Exception):  # noqa: N818
    """A rejection that only HTTP has."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error

"""Errors of the HTTP API: an HTTP status, a machine-readable code and headers. Each protocol has its own format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from svc_common.errors import QuireError, Reason

_BY_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_BY_REASON: dict[Reason, int] = {Reason.MESSAGE_TOO_LARGE: 413}


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error response. `code` is the machine-readable reason, in lower case; `retry_after` is in seconds."""

    status: int
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
        retry_after = None if error.retry_after is None else max(1, math.ceil(error.retry_after))
        in_vain = error.reason in (Reason.REQUEST_QUARANTINED, Reason.REQUEST_LOST) or (
            error.reason is Reason.DEADLINE_TOO_SHORT and retry_after is None
        )
        return cls(
            status=_BY_REASON.get(error.reason) or _BY_STATUS[error.code],
            code=error.reason.value.lower(),
            message=valid_unicode(str(error)),
            param=None if error.field is None else valid_unicode(error.field),
            retry_after=retry_after,
            should_retry="false" if in_vain else None,
            connection="close" if error.reason is Reason.DRAINING else None,
        )

    @property
    def headers(self) -> dict[str, str]:
        """The error's own headers."""
        headers = {
            "retry-after": self.retry_after,
            "x-should-retry": self.should_retry,
            "allow": self.allow,
            "connection": self.connection,
            "www-authenticate": "Bearer" if self.status == 401 else None,  # RFC 9110 requires it
        }
        return {name: str(value) for name, value in headers.items() if value is not None}


def valid_unicode(text: str) -> str:
    """A text that may repeat what a client sent, with halves of surrogate pairs as escapes: JSON can have them, UTF-8
    cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


class ErrorFormat(Protocol):
    """How a protocol sends errors."""

    def body(self, error: HttpError) -> Mapping[str, Any]:
        """The body of an error response."""
        ...

    def event(self, error: HttpError) -> bytes:
        """The last event of a stream that fails."""
        ...


NO_ROUTE = HttpError(404, "not_found", "there is nothing at this address")
WRONG_METHOD = HttpError(405, "method_not_allowed", "this address takes another method")
LATE_BODY = HttpError(408, "request_timeout", "the body did not come in time", connection="close")
NOT_JSON = HttpError(415, "unsupported_media_type", "Content-Type must be application/json", "Content-Type")
COMPRESSED = HttpError(
    415,
    "unsupported_media_type",
    "Content-Encoding must be identity: compressed bodies are not supported",
    "Content-Encoding",
)


class HttpRejection(Exception):  # noqa: N818
    """A rejection that only HTTP has."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error

"""The one error that calls raise: a gRPC status with its google.rpc details, as plain values."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_REQUEST_ID_KEY = "x-request-id"
_TOO_LARGE = re.compile(r"Received message larger than max \((\d+) vs\. (\d+)\)")  # grpc's text

UNREACHABLE = "UNREACHABLE"
"""The reason where nothing responds at the address, or the connection broke."""

NO_GRPC = "NO_GRPC"
"""The reason where a server responds at the address in HTTP/1.1."""

TLS_FAILED = "TLS_FAILED"
"""The reason where a server responds at the address, and TLS with it fails."""

BROKEN_STREAM = "BROKEN_STREAM"
"""The reason where a stream ended early, or tokens are missing."""

_CONNECTION_FAILURES = (
    ("Trying to connect an http1.x server", NO_GRPC, "no gRPC at {}: a server responds there in HTTP/1.1"),
    ("missing selected ALPN property", NO_GRPC, "no gRPC at {}: a server responds there in HTTP/1.1"),
    ("certificate has expired", TLS_FAILED, "no connection to {}: its certificate has expired"),
    ("Hostname Verification Check failed", TLS_FAILED, "no connection to {}: its certificate is for another host"),
    ("CERTIFICATE_VERIFY_FAILED", TLS_FAILED, "no connection to {}: its certificate is not of a CA that is trusted"),
    ("WRONG_VERSION_NUMBER", TLS_FAILED, "no connection to {}: the server there has no TLS"),
    (
        "last error: .*Socket closed",  # nothing else is reported where a server with TLS rejects a client
        TLS_FAILED,
        "no connection to {}: the server closes it; it may require TLS, or another certificate of its client",
    ),
    ("", UNREACHABLE, "no connection to {}"),
)
"""Patterns of grpc's texts about sockets, each with the reason and the message for it; the first one that fits counts.
"""


@dataclass(eq=False)
class QuireError(Exception):
    """A call that was rejected, failed, or could not be made.

    `reason` is the machine-readable cause: one of the server's ("CONTEXT_LENGTH_EXCEEDED", "MODEL_NOT_FOUND", …), one
    of this module's, or the name of `code` where the server gave none. `field` is the path of the request's field at
    fault ("sampling.top_p"); `retry_after` is in seconds, where a retry makes sense. `is_answer`: the server sent the
    error; otherwise the client made it, mostly about a connection.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    field: str | None = None
    retry_after: float | None = None
    request_id: str | None = None
    is_answer: bool = False

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    @classmethod
    def from_rpc(cls, error: grpc.RpcError, address: str) -> "QuireError":
        """The error of a call to `address`, from grpc's."""
        call = cast(_FailedCall, error)
        code = call.code()
        metadata = dict(call.trailing_metadata() or ())
        result = cls(code, code.name, call.details() or code.name.lower().replace("_", " "))
        request_id = metadata.get(_REQUEST_ID_KEY)
        result.request_id = request_id if isinstance(request_id, str) else None
        details = metadata.get(_DETAILS_KEY)
        if isinstance(details, bytes):
            result._read_details(details)
        elif code is grpc.StatusCode.UNAVAILABLE:
            # Quire's servers always send details: this is grpc's own text about sockets.
            named = address if ":" in address else f"{address}, port 443 (the address has no port)"
            for pattern, reason, message in _CONNECTION_FAILURES:
                if re.search(pattern, result.message):
                    result.reason, result.message = reason, message.format(named)
                    break
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            result.message = "no answer within the timeout"
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(result.message)):
            # grpc refuses it before Quire sees it.
            result.reason = "MESSAGE_TOO_LARGE"
            result.message = f"the message has {sizes[1]} bytes, and may have {sizes[2]}"
        return result

    def _read_details(self, serialized: bytes) -> None:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        request = error_details_pb2.RequestInfo()
        try:
            for detail in status_pb2.Status.FromString(serialized).details:
                if detail.Unpack(info):
                    self.reason = info.reason
                    self.is_answer = True
                elif detail.Unpack(bad_request) and bad_request.field_violations:
                    self.field = bad_request.field_violations[0].field
                    self.message = bad_request.field_violations[0].description
                elif detail.Unpack(retry):
                    self.retry_after = retry.retry_delay.ToTimedelta().total_seconds()
                elif detail.Unpack(request):
                    self.request_id = request.request_id
        except DecodeError:
            # Not of a Quire server, perhaps of a proxy: there are only code and text.
            return


def unreachable(message: str) -> QuireError:
    """The error of a gateway that does not respond."""
    return QuireError(grpc.StatusCode.UNAVAILABLE, UNREACHABLE, message)


def local_error(status: grpc.StatusCode, why: str) -> QuireError:
    """An error that the client finds itself, whose reason is the name of its status."""
    return QuireError(status, status.name, why)


def closed(what: str) -> QuireError:
    """The error of a call that ended because its caller closed `what`."""
    return local_error(grpc.StatusCode.CANCELLED, f"{what} was closed")


@contextmanager
def closed_errors(is_closed: Callable[[], bool]) -> Iterator[None]:
    """Raises QuireError where no call can be made within the block since the client was closed."""
    try:
        yield
    except ValueError as error:  # grpc's, for a channel that was closed
        if not is_closed():
            raise
        raise closed("the client") from error


def is_no_response(error: QuireError) -> bool:
    """Whether a call failed because no server responded."""
    silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return error.code in silent and not error.is_answer


class _FailedCall(Protocol):
    """The methods of grpc's errors, which RpcError does not declare."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> list[tuple[str, str | bytes]] | None: ...


@contextmanager
def quire_errors(address: str) -> Iterator[None]:
    """Turns errors of grpc within into QuireError."""
    try:
        yield
    except grpc.RpcError as error:
        raise QuireError.from_rpc(error, address) from error

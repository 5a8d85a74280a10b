"""Why calls and connections are refused before any of their requests is submitted, as a label of a metric."""

from collections.abc import Callable
from enum import StrEnum
from typing import Literal

from gateway_svc.call_limits import BODY_BYTES, CALLS, SLOW_MESSAGES
from gateway_svc.tenant_shares import NoShare
from svc_common.errors import QuireError, Reason

Protocol = Literal["grpc", "http", "websocket"]


class Refusal(StrEnum):
    """Why a call or a connection was refused, or closed before its request had come."""

    CREDENTIAL = "credential"
    HOST = "host"
    ORIGIN = "origin"
    CONNECTIONS = "connections"
    CALLS = "calls"
    BODY_BYTES = "body_bytes"
    SLOW_MESSAGES = "slow_messages"
    TOO_LARGE = "too_large"
    TOO_LATE = "too_late"
    MALFORMED = "malformed"


Refuse = Callable[[Protocol, Refusal], None]
"""Counts a refusal."""

_OF_UNITS = {
    CALLS: Refusal.CALLS,
    BODY_BYTES: Refusal.BODY_BYTES,
    SLOW_MESSAGES: Refusal.SLOW_MESSAGES,
}
_OF_REASONS = {
    Reason.UNAUTHENTICATED: Refusal.CREDENTIAL,
    Reason.MESSAGE_TOO_LARGE: Refusal.TOO_LARGE,
    Reason.MALFORMED_MESSAGE: Refusal.MALFORMED,
}
_OF_HTTP_CODES = {
    "host_not_allowed": Refusal.HOST,
    "origin_not_allowed": Refusal.ORIGIN,
    "request_timeout": Refusal.TOO_LATE,
}


def refusal_of(error: QuireError) -> Refusal | None:
    """Why a call was refused before any request of it was submitted; None: the error is another one, as of a field."""
    if isinstance(error, NoShare):
        return _OF_UNITS.get(error.unit)
    return _OF_REASONS.get(error.reason)


def refusal_of_http(code: str) -> Refusal | None:
    """The same for an error that only HTTP has, by its code."""
    return _OF_HTTP_CODES.get(code)

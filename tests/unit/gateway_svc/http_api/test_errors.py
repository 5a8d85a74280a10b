"""Errors of the HTTP API, and their format in OpenAI's."""

import pytest

from gateway_svc.http_api.errors import NO_ROUTE, HttpError
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from svc_common.errors import QuireError, Reason

TABLE = {
    Reason.MALFORMED_MESSAGE: (400, "invalid_request_error"),
    Reason.INVALID_FIELD: (400, "invalid_request_error"),
    Reason.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error"),
    Reason.FEATURE_UNSUPPORTED: (400, "invalid_request_error"),
    Reason.GRAMMAR_INVALID: (400, "invalid_request_error"),
    Reason.GRAMMAR_TOO_COMPLEX: (400, "invalid_request_error"),
    Reason.MESSAGE_TOO_LARGE: (413, "invalid_request_error"),
    Reason.UNAUTHENTICATED: (401, "authentication_error"),
    Reason.PERMISSION_DENIED: (403, "permission_error"),
    Reason.MODEL_NOT_FOUND: (404, "invalid_request_error"),
    Reason.MODEL_NOT_READY: (503, "service_unavailable"),
    Reason.NOT_FOUND: (404, "invalid_request_error"),
    Reason.IDEMPOTENCY_KEY_REUSED: (409, "invalid_request_error"),
    Reason.CAPACITY_EXHAUSTED: (503, "service_unavailable"),
    Reason.TENANT_QUOTA_EXCEEDED: (429, "rate_limit_error"),
    Reason.DEADLINE_TOO_SHORT: (503, "service_unavailable"),
    Reason.DRAINING: (503, "service_unavailable"),
    Reason.RESUME_OFFSET_INVALID: (400, "invalid_request_error"),
    Reason.REQUEST_UNKNOWN: (404, "invalid_request_error"),
    Reason.REQUEST_QUARANTINED: (500, "server_error"),
    Reason.REQUEST_LOST: (500, "server_error"),
    Reason.STORE_DEGRADED: (503, "service_unavailable"),
    Reason.NOT_LEADER: (503, "service_unavailable"),
    Reason.PROTOCOL_UNSUPPORTED: (400, "invalid_request_error"),
    Reason.DEADLINE_EXCEEDED: (504, "timeout"),
    Reason.CANCELLED: (499, "cancelled"),
    Reason.INTERNAL: (500, "server_error"),
}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_status(reason: Reason) -> None:
    error = HttpError.of(QuireError(reason, "it is so"))
    assert (error.status, OPENAI_ERRORS.body(error)["error"]["type"]) == TABLE[reason]


def test_a_body_names_the_field_and_the_reason() -> None:
    error = HttpError.of(QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, "is too long", field="messages"))
    assert OPENAI_ERRORS.body(error) == {
        "error": {
            "message": "messages: is too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


def test_seconds_to_wait_are_rounded_up() -> None:
    for seconds, header in ((1.2, "2"), (0.0, "1")):
        error = HttpError.of(QuireError(Reason.CAPACITY_EXHAUSTED, "soon", retry_after=seconds))
        assert error.headers == {"retry-after": header}
    assert NO_ROUTE.headers == {}


def test_a_deadline_that_no_later_time_helps_is_not_tried_again() -> None:
    assert HttpError.of(QuireError(Reason.DEADLINE_TOO_SHORT, "too soon")).headers == {"x-should-retry": "false"}
    busy = HttpError.of(QuireError(Reason.DEADLINE_TOO_SHORT, "too soon", retry_after=3))
    assert busy.headers == {"retry-after": "3"}


@pytest.mark.parametrize("reason", [Reason.REQUEST_QUARANTINED, Reason.REQUEST_LOST])
def test_what_killed_workers_or_was_lost_is_not_tried_again(reason: Reason) -> None:
    assert HttpError.of(QuireError(reason, "so")).headers == {"x-should-retry": "false"}


def test_a_draining_gateway_closes_the_connection() -> None:
    error = HttpError.of(QuireError(Reason.DRAINING, "soon", retry_after=1))
    assert error.headers == {"retry-after": "1", "connection": "close"}

"""Errors in OpenAI's format: a body with message, type, param and code."""

from typing import Any

from gateway_svc.http_api.errors import HttpError
from gateway_svc.http_api.events import sse_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout",
}


class OpenAiErrors:
    """The error format of OpenAI's API."""

    def body(self, error: HttpError) -> dict[str, Any]:
        kind = _TYPES.get(error.status, "invalid_request_error")
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

    def event(self, error: HttpError) -> bytes:
        return sse_event(self.body(error))


OPENAI_ERRORS = OpenAiErrors()

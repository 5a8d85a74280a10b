"""Errors in Anthropic's format."""

from typing import Any

from gateway_svc.http_api.errors import HttpError
from gateway_svc.http_api.events import named_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# By this the tool runners of Anthropic's clients know that they must send whole conversations: they ask for a thread,
# which is a conversation that the server keeps, in each request.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class AnthropicErrors:
    """The error format of Anthropic's API. The message names the field."""

    def body(self, error: HttpError) -> dict[str, Any]:
        described: dict[str, Any] = {
            "type": _TYPES.get(error.status, "invalid_request_error"),
            "message": error.message,
        }
        if error.code == "feature_unsupported" and error.param == "thread":
            described["details"] = _NO_THREADS
        return {"type": "error", "error": described}

    def event(self, error: HttpError) -> bytes:
        return named_event("error", self.body(error))


ANTHROPIC_ERRORS = AnthropicErrors()

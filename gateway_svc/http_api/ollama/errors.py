"""Errors in Ollama's format."""

from typing import Any

from gateway_svc.http_api.errors import HttpError
from gateway_svc.http_api.events import json_line


class OllamaErrors:
    """The error format of Ollama's API. The message names the field."""

    def body(self, error: HttpError) -> dict[str, Any]:
        return {"error": error.message}

    def event(self, error: HttpError) -> bytes:
        return json_line(self.body(error))


OLLAMA_ERRORS = OllamaErrors()

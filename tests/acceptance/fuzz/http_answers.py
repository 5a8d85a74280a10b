"""The check of HTTP answers against the OpenAPI document and the documented errors."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from schemathesis import Case, Response
from schemathesis.checks import CheckFunction
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway_svc.http_api.errors import LATE_BODY, NO_ROUTE, NOT_JSON, WRONG_METHOD, HttpError
from svc_common.errors import QuireError, Reason
from tests.acceptance.fuzz.rounds import INTERNAL_ERROR, NEVER

_JSON = "application/json"
_STREAMS = ("text/event-stream", "application/x-ndjson")
_CHECKS: tuple[CheckFunction, ...] = (status_code_conformance, content_type_conformance, response_headers_conformance)
_MAX_SHOWN = 600  # characters
_EVENT_ID = re.compile(r'^{"event_id":"[^"]+",')  # of server-sent events, which a message has as its first member


def _status_by_code() -> Mapping[str, int]:
    errors = [HttpError.of(QuireError(reason, "")) for reason in Reason if reason not in NEVER]
    return {error.code: error.status for error in (*errors, NO_ROUTE, WRONG_METHOD, LATE_BODY, NOT_JSON)}


STATUS_BY_CODE = _status_by_code()
"""The status of each code that an error may have here: docs/api.md, and tests/unit/test_docs.py compares them."""


class AnswerChecker:
    """Checks answers of the operations of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._validators: dict[str, Draft202012Validator] = {}

    def problems(self, case: Case[Any], response: Response) -> Iterator[str]:
        """What is wrong with an answer: each problem has a line, and some have details in a second one."""
        kind, status = content_type(response), response.status_code
        if INTERNAL_ERROR.search(text_of(response)):
            yield f"{status} with an internal error"
        try:
            case.validate_response(response, [*_CHECKS, *([response_schema_conformance] if kind == _JSON else [])])
        except FailureGroup as group:
            for failure in group.exceptions:
                yield f"{status} {kind}: {failure.title}\n  {_shown(failure.message)}"
        if status >= 400:
            yield from problems_of_error(response)
        elif kind in _STREAMS and kind in (described := self._described(case, "200")):
            errors = self._described(case, "4XX")[_JSON]
            validator = self._validator(f"{case.operation.label} {kind}", described[kind], errors)
            yield from _problems_of_stream(response, kind, validator)

    def problems_of_message(self, case: Case[Any], message: str, is_stream: bool) -> Iterator[str]:
        """What is wrong with a message over WebSocket that is not the last one of a stream."""
        described, errors = self._described(case, "200"), self._described(case, "4XX")[_JSON]
        kind = _STREAMS[0] if is_stream else _JSON
        if INTERNAL_ERROR.search(message):
            yield "a message with an internal error"
        validator = self._validator(f"{case.operation.label} {kind}", described[kind], errors)
        yield from _problems_of_event(_EVENT_ID.sub("{", message) if is_stream else message, "WebSocket", validator)

    def _described(self, case: Case[Any], status: str) -> Mapping[str, Any]:
        """What the document says of answers with a status, by their type."""
        operation = case.operation
        responses = self._document["paths"][operation.path][operation.method.lower()]["responses"]
        content: Mapping[str, Any] = responses[status]["content"]
        return content

    def _validator(self, name: str, *contents: Mapping[str, Any]) -> Draft202012Validator:
        if name not in self._validators:
            schema = {"anyOf": [one["schema"] for one in contents], "components": self._document["components"]}
            self._validators[name] = Draft202012Validator(schema)
        return self._validators[name]


def _problems_of_stream(response: Response, kind: str, validator: Draft202012Validator) -> Iterator[str]:
    """Each event is JSON of the schema of events, and an error among them is one of the documented ones."""
    for data in _events(text_of(response)):
        yield from _problems_of_event(data, kind, validator)


def _problems_of_event(data: str, kind: str, validator: Draft202012Validator) -> Iterator[str]:
    try:
        event = json.loads(data)
    except ValueError:
        yield f"an event of {kind} is not JSON\n  {_shown(data)}"
        return
    if (code := code_of(event)) is not None and code not in STATUS_BY_CODE:
        yield f"an event of {kind} has the error {code}"
    if (error := next(validator.iter_errors(event), None)) is not None:
        yield f"an event of {kind} has another schema\n  {_shown(error.message)}"


def problems_of_error(response: Response) -> Iterator[str]:
    """What is wrong with the status of an error, its code, or its time to wait."""
    status, headers = response.status_code, response.headers
    try:
        code = code_of(json.loads(text_of(response)))
    except ValueError:
        yield f"{status} whose body is not JSON\n  {_shown(text_of(response))}"
        return
    if code is not None and STATUS_BY_CODE.get(code) != status:
        yield f"{status} with the code {code}"
    if status >= 500 and status not in (503, 504):
        yield f"{status}"
    if status == 503 and "retry-after" not in headers and headers.get("x-should-retry") != ["false"]:
        yield f"503 {code} without Retry-After"


def code_of(body: Any) -> str | None:
    """The code of an error, or of an event that is an error; None if it has none, as Anthropic's and Ollama's."""
    if not isinstance(body, dict):
        return None
    error = body if body.get("type") == "error" and "code" in body else body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def content_type(response: Response) -> str:
    """The type without its parameters."""
    return response.headers.get("content-type", [""])[0].partition(";")[0]


def text_of(response: Response) -> str:
    """The body as text."""
    return response.content.decode(errors="replace")


def _events(text: str) -> Iterator[str]:
    """The data of server-sent events, or lines of JSON."""
    for line in text.split("\n"):  # other separators of lines may be within JSON
        name, _, data = line.partition(":")
        if line.startswith("{"):
            yield line
        elif name == "data" and data.strip() != "[DONE]":
            yield data.strip()


def _shown(text: str) -> str:
    return " ".join(text.split())[:_MAX_SHOWN]

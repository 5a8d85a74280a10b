"""A line of a batch's input, checked, and the line of the output that answers it."""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

ID_PREFIX = "batch_req_"
DIGEST_BYTES = 16

RESPONSES = "/v1/responses"
_FIELDS = ("custom_id", "method", "url", "body")
_STREAMED_BY_DEFAULT = ("/api/chat", "/api/generate")
_DIGITS_ADVICE = "sys.set_int_max_str_digits"
"""What Python's error about an integer with thousands of digits advises."""
_INVOCATIONS = "/invocations"
# Paths whose requests the server runs under a name. /v1/responses and /invocations depend on the body.
_NAMED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/messages"),
    *_STREAMED_BY_DEFAULT,
)


class BatchError(Exception):
    """A batch that cannot be run, or cannot go on. The text is a message for users."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch. `number` is that of its line, from 1. `body` is sent as it is here.

    `digest` is of all that says what the request is: custom_id, url and body, with the order of the body's fields,
    which has a meaning in JSON schemas. `ignored_fields` are names of fields that have no effect.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    digest: bytes
    is_nameable: bool
    """Whether the server runs it under a name, so that a call that is repeated goes on with it."""
    ignored_fields: tuple[str, ...]

    @property
    def id(self) -> str:
        """The `id` of the output's line: it says which line it answers, and that line's content."""
        return f"{ID_PREFIX}{self.number}_{self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The response to a request. `body` is JSON in bytes; None: the response had no JSON, and `problem` is its text.

    `status` None: there is no response, since the request was not answered in time, and `problem` says so.
    """

    status: int | None
    request_id: str | None
    body: bytes | None
    problem: str | None = None

    @property
    def is_error(self) -> bool:
        """Whether there is no answer with a status of success and a body of JSON."""
        return self.status is None or not (200 <= self.status < 300) or self.body is None

    def output_line(self, line: BatchLine) -> bytes:
        """The line of the output, with its end.

        A refused request is a line of the output like any other, with the status and the server's error as its body,
        and not one of a second file: so each line of the input has one line in one file, the output alone says where a
        batch stopped, and a client that is killed cannot leave a request in two files or in none. Users select by
        `response.status_code`. OpenAI writes the same lines.
        """
        start = b'{"id": "%b", "custom_id": %b' % (line.id.encode(), _dump(line.custom_id))
        return start + b', "response": %b, "error": %b}\n' % (self._response(), _dump(self._error()))

    def _response(self) -> bytes:
        if self.status is None:
            return b"null"
        # As the server wrote it, on one line: within strings, JSON has no line breaks.
        body = b"null" if self.body is None else self.body.strip().replace(b"\r", b" ").replace(b"\n", b" ")
        return b'{"status_code": %d, "request_id": %b, "body": %b}' % (self.status, _dump(self.request_id), body)

    def _error(self) -> dict[str, str | None] | None:
        if self.body is not None:
            return None
        return {"code": "request_timeout" if self.status is None else f"http_{self.status}", "message": self.problem}


def read_line(data: bytes, number: int) -> BatchLine:
    """A line of the input. Raises BatchError, which names line and field."""
    try:
        return _read(
            json.loads(data.decode(), object_pairs_hook=_unique_fields, parse_constant=reject_constant), number
        )
    except json.JSONDecodeError as error:
        raise BatchError(f"line {number}: is not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise BatchError(f"line {number}: is not UTF-8") from None
    except RecursionError:
        raise BatchError(f"line {number}: is nested too deeply") from None
    except ValueError as error:
        why = "has a number with too many digits" if _DIGITS_ADVICE in str(error) else error
        raise BatchError(f"line {number}: {why}") from None


def is_nothing_or_false(value: Any) -> bool:
    """Whether a field's value turns it off."""
    return value is None or value is False


def _read(fields: Any, number: int) -> BatchLine:
    """Raises ValueError, which names the field."""
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object")
    for name in _FIELDS:
        if fields.get(name) is None:
            raise ValueError(f"{name}: must be given")
    custom_id, method, url, body = (fields[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id: must be a string that is not empty")
    if method != "POST":
        raise ValueError('method: must be "POST"')
    if not isinstance(url, str) or not url.startswith("/"):
        raise ValueError("url: must be a path such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise ValueError("body: must be a JSON object")
    path = url.rstrip("/")
    _check_delivery(path, body)
    data = _dump_body(body)
    return BatchLine(
        number=number,
        custom_id=custom_id,
        url=url,
        body=data,
        digest=sha256(_dump([custom_id, url]) + data).digest()[:DIGEST_BYTES],
        is_nameable=_is_nameable(path, body),
        ignored_fields=tuple(name for name in fields if name not in _FIELDS),
    )


def _is_nameable(path: str, body: dict[str, Any]) -> bool:
    if path == RESPONSES:
        return body.get("store") is not False
    if path == _INVOCATIONS:  # a chat or a completion; embeddings, scores and rerankings have no name
        return body.get("messages") is not None or body.get("prompt") is not None
    return path in _NAMED


def _check_delivery(path: str, body: dict[str, Any]) -> None:
    """Raises ValueError for a body whose response would not be the whole answer."""
    if not is_nothing_or_false(body.get("stream")):
        raise ValueError("body.stream: must be left out or false: a batch has whole answers")
    if path in _STREAMED_BY_DEFAULT and body.get("stream") is not False:
        raise ValueError(f"body.stream: must be false: {path} streams otherwise, and a batch has whole answers")
    if path == RESPONSES and not is_nothing_or_false(body.get("background")):
        raise ValueError("body.background: must be left out or false: a batch waits for answers")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated}: is there twice in one object")
    return fields


def reject_constant(constant: str) -> Any:
    """For NaN and Infinity, which Python's json reads. Raises ValueError."""
    raise ValueError(f"{constant} is no number of JSON")


def _dump_body(body: dict[str, Any]) -> bytes:
    try:
        return _dump(body)
    except ValueError:
        raise ValueError("body: has a number that is not finite") from None


def _dump(value: Any) -> bytes:
    """JSON without line breaks. Raises ValueError for a number that is not finite."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can spell
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

"""JSON and server-sent events, as bytes."""

import json
import re
from collections.abc import Callable
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

# json does not escape them. Clients that read streams line by line may end a line here: httpx does, as str.splitlines.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")

_SLICE = 32
"""Elements of a long list that are one piece: numbers, log-probabilities or items."""

PLACEHOLDER = "\0"
"""Stands for a text in a template. No id and no name has this character."""


def to_json(body: Any) -> bytes:
    """JSON in UTF-8 on one line, by Unicode's ends of lines too, without spaces."""
    text = _ENCODER.encode(body)
    if not text.isascii():
        text = _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text)
    return text.encode()


def long_json(body: Any) -> bytes:
    """The same in short pieces, for a thread: one that encodes a piece holds up all others of the process."""
    match body:
        case dict():
            return b"{" + b",".join([to_json(name) + b":" + long_json(value) for name, value in body.items()]) + b"}"
        case list() if len(body) > _SLICE:
            slices = [to_json(body[start : start + _SLICE])[1:-1] for start in range(0, len(body), _SLICE)]
            return b"[" + b",".join(slices) + b"]"
        case list():
            return b"[" + b",".join([long_json(value) for value in body]) + b"]"
    return to_json(body)


def json_line(body: Any) -> bytes:
    """A line of JSON."""
    return to_json(body) + b"\n"


def sse_event(body: Any, encode: Callable[[Any], bytes] = to_json) -> bytes:
    """A server-sent event of JSON."""
    return b"data: " + encode(body) + b"\n\n"


def named_event(name: str, body: Any, encode: Callable[[Any], bytes] = to_json) -> bytes:
    """A server-sent event of JSON, with a name."""
    return f"event: {name}\n".encode() + sse_event(body, encode)


class TextEventTemplate:
    """Events that differ only in a text: the rest is rendered once."""

    __slots__ = ("_after", "_before")

    def __init__(self, body: Any, name: str | None = None) -> None:
        """`body` has a PLACEHOLDER instead of the text. `name` is that of the events, if they have one."""
        event = sse_event(body) if name is None else named_event(name, body)
        self._before, _, self._after = event.partition(to_json(PLACEHOLDER))

    def with_text(self, text: str) -> bytes:
        """The event of one text."""
        return self._before + to_json(text) + self._after

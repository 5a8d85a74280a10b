"""JSON and server-sent events, as bytes."""

import json
from collections.abc import Callable, Iterator
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

# json does not escape them. Clients that read streams line by line may end a line here: httpx does, as str.splitlines.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}

_SLICE = 32
"""Elements of a long list that are one piece: numbers, log-probabilities or items."""
_TEXT_SLICE = 16_384
"""Characters of a long text that are one piece."""

PLACEHOLDER = "\0"
"""Stands for a text in a template. No id and no name has this character."""


def to_json(body: Any) -> bytes:
    """JSON in UTF-8 on one line, by Unicode's ends of lines too, without spaces."""
    text = _ENCODER.encode(body)
    if not text.isascii():
        for end, escape in _LINE_ENDS.items():
            text = text.replace(end, escape)
    return text.encode()


def long_json(body: Any) -> bytes:
    """The same in short pieces, for a thread: one that encodes a piece holds up all others of the process."""
    match body:
        case dict():
            return b"{" + b",".join([to_json(name) + b":" + long_json(value) for name, value in body.items()]) + b"}"
        case list():
            return b"[" + b",".join(_pieces(body)) + b"]"
        case str() if len(body) > _TEXT_SLICE:
            slices = [body[start : start + _TEXT_SLICE] for start in range(0, len(body), _TEXT_SLICE)]
            return b'"' + b"".join([to_json(one)[1:-1] for one in slices]) + b'"'
    return to_json(body)


def _pieces(elements: list[Any]) -> Iterator[bytes]:
    for start in range(0, len(elements), _SLICE):
        part = elements[start : start + _SLICE]
        are_numbers = isinstance(part[0], int | float)
        if len(elements) <= _SLICE or (not are_numbers and any(map(_is_long, part))):
            yield from map(long_json, part)
        else:
            yield to_json(part)[1:-1]


def _is_long(element: Any) -> bool:
    """Whether an element of a long list is no part of a piece: a vector, or an object with a vector or a long text."""
    match element:
        case dict():
            return any(map(_is_long, element.values()))
        case list():
            return len(element) > _SLICE
        case str():
            return len(element) > _TEXT_SLICE // _SLICE
    return False


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

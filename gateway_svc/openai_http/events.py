"""JSON and server-sent events, as bytes."""

import json
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

PLACEHOLDER = "\0"
"""Stands for a text in a template. No id and no name has this character."""


def to_json(body: Any) -> bytes:
    """JSON in UTF-8, without spaces."""
    return _ENCODER.encode(body).encode()


def sse_event(body: Any) -> bytes:
    """A server-sent event of JSON."""
    return b"data: " + to_json(body) + b"\n\n"


class TextEventTemplate:
    """Events that differ only in a text: the rest is rendered once."""

    __slots__ = ("_after", "_before")

    def __init__(self, body: Any) -> None:
        """`body` has a PLACEHOLDER instead of the text."""
        self._before, _, self._after = sse_event(body).partition(to_json(PLACEHOLDER))

    def with_text(self, text: str) -> bytes:
        """The event of one text."""
        return self._before + to_json(text) + self._after

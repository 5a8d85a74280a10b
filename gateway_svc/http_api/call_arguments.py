"""Arguments of calls as objects, for protocols that do not send them as text."""

import json
import math
from typing import Any

from pydantic_core import from_json

_MAX_DIGITS = 1_000  # of an integer


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, as a model wrote them. Of those that max_tokens cut off, what is there. What an answer
    cannot have is replaced: a number without a finite value, and an integer of more than 1,000 digits, by null; half
    of a surrogate pair by a question mark. What is no object is an empty one."""
    try:
        value = _sendable(_parse(text))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parse(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        # Reads only what is complete, but also long integers, NaN, halves of surrogate pairs, and more than 200 levels.
        return json.loads(text, parse_int=_integer)


def _integer(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None


def _sendable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case list():
            return [_sendable(item) for item in value]
        case dict():
            return {_sendable(name): _sendable(item) for name, item in value.items()}
    return value

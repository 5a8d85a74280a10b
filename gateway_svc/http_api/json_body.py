"""Parses the JSON of a body, within bounds. Refuses keys that an object has twice, NaN, infinities and numbers that are
too large for a double."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway_svc.http_api.errors import valid_unicode
from svc_common.errors import QuireError, Reason

MAX_JSON_TOKENS = 2**20
"""Strings, commas and opening brackets of a body. The parser holds Python's lock for up to 0.2 s for so many; for the
5.6 million lists that fit 16 MiB it was 1.6 s, in which no stream got a token."""

_MAX_PATH = 200  # characters of a path in an error
# Possessive, so that a long string takes no memory, and without need of the last quote, so that the time is linear.
_JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)


class _Place(NamedTuple):
    """Where a value of a body is: in what, and its key or index there."""

    above: "_Place | None"
    name: str | int


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A parsed body. Numbers without a finite value are NaN in `values`: NaN and Infinity, which Python parses and JSON
    does not have, and numbers such as 1e999. They are rejected by the name of the field that is read, or else for the
    whole body."""

    values: Mapping[str, Any]
    non_finite: tuple[str, ...]

    def reject_non_finite(self) -> None:
        """Raises QuireError MALFORMED_MESSAGE where a field that was not read has one."""
        if self.non_finite:
            raise QuireError(Reason.MALFORMED_MESSAGE, f"the body holds {self.non_finite[0]}: not a finite number")


def invalid(where: str, message: str) -> QuireError:
    """The error to raise about a field."""
    return QuireError(Reason.INVALID_FIELD, message, field=where)


def parse_body(data: bytes) -> JsonBody:
    """A body that is a JSON object. Raises QuireError: MALFORMED_MESSAGE, MESSAGE_TOO_LARGE where it has too many
    values, INVALID_FIELD where an object has a key twice, as parsers differ in which value they take."""
    if _has_too_many_tokens(data):
        message = f"the body has more than {MAX_JSON_TOKENS} strings, commas and brackets"
        raise QuireError(Reason.MESSAGE_TOO_LARGE, message)
    non_finite: list[str] = []
    repeated_keys: dict[int, tuple[dict[str, Any], str]] = {}

    def not_finite(text: str) -> float:
        non_finite.append(printable(text))
        return math.nan

    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else not_finite(text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated_keys[id(values)] = values, next(key for key in counts if counts[key] > 1)
        return values

    try:
        # Not json.loads(data), which takes UTF-16 and UTF-32 as well: JSON is UTF-8 (RFC 8259).
        text = data.decode("utf-8-sig")
        values = json.loads(text, parse_float=number, parse_constant=not_finite, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise QuireError(Reason.MALFORMED_MESSAGE, "the body is not JSON") from None
    if not isinstance(values, dict):
        raise QuireError(Reason.MALFORMED_MESSAGE, "the body is not a JSON object")
    if repeated_keys:
        raise invalid(_repeated_field(values, repeated_keys), "is there twice")
    return JsonBody(values, tuple(non_finite))


def _has_too_many_tokens(data: bytes) -> bool:
    if sum(map(data.count, (b"[", b"{", b",", b'"'))) <= MAX_JSON_TOKENS:
        return False
    # Many of these may be text. A loop in Python, other than one call, lets other threads run.
    return any(index == MAX_JSON_TOKENS for index, _ in enumerate(_JSON_TOKEN.finditer(data)))


def _repeated_field(body: dict[str, Any], repeated_keys: Mapping[int, tuple[dict[str, Any], str]]) -> str:
    """The path of a field that its object has twice. `repeated_keys` has each such object, with one key, by its id."""
    # Values with their places, and only of the one that is found the path: a long key may have many values below it.
    left: list[tuple[_Place | None, Any]] = [(None, body)]
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            if id(value) in repeated_keys:
                return printable(_path(_Place(place, repeated_keys[id(value)][1])))
            left += ((_Place(place, name), item) for name, item in value.items())
        elif isinstance(value, list):
            left += ((_Place(place, index), item) for index, item in enumerate(value))
    raise AssertionError("the outermost object with a repeated key is a part of the body")


def _path(place: _Place) -> str:
    parts: list[str] = []
    left: _Place | None = place
    while left is not None:
        left, name = left
        parts.append(f"[{name}]" if isinstance(name, int) else f".{name}")
    return "".join(reversed(parts)).removeprefix(".")


def json_text(where: str, value: Any) -> str:
    """A part of a body as text. Raises QuireError, which names the field `where`, for one of too many levels."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise invalid(where, "has too many levels") from None


def printable(path: str) -> str:
    """A path or a number as the client spells it: short, and without halves of surrogate pairs."""
    cut = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}…"
    return valid_unicode(cut)

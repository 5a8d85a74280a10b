"""Reads typed values from a JSON body. A value of another type is rejected by the field's name in the body."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway_svc.sampling_fields import SamplingField, Value
from svc_common.errors import QuireError, Reason

T = TypeVar("T")

MAX_JSON_TOKENS = 2**20
"""Strings, commas and opening brackets of a body. The parser holds Python's lock for up to 0.2 s for so many; for the
5.6 million lists that fit 16 MiB it was 1.6 s, in which no stream got a token."""

_MAX_PATH = 200  # characters of a path in an error
# Possessive, so that a long string takes no memory, and without need of the last quote, so that the time is linear.
_JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)


class JsonFields:
    """An object of a body. A field that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """`path` is the object's path, with a dot at its end where it is not the body itself."""
        self._values = values
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The field's value, unchecked, or None."""
        return self._values.get(name)

    def number(self, name: str) -> float | None:
        return self._read(name, as_number)

    def integer(self, name: str) -> int | None:
        """An integer, written without fraction or exponent."""
        return self._read(name, as_integer)

    def sampling(self, parameters: Iterable[SamplingField]) -> dict[str, Value]:
        """Those of these parameters that are present, by name."""
        read = {one.name: self.integer(one.name) if one.is_integer else self.number(one.name) for one in parameters}
        return {name: value for name, value in read.items() if value is not None}

    def flag(self, name: str) -> bool:
        """true or false; absent is false."""
        return self._read(name, as_flag) or False

    def string(self, name: str) -> str | None:
        return self._read(name, as_string)

    def objects(self, name: str) -> list["JsonFields"] | None:
        values = self._read(name, as_list)
        if values is None:
            return None
        paths = (f"{self._path}{name}[{index}]" for index in range(len(values)))
        return [JsonFields(as_object(path, value), f"{path}.") for path, value in zip(paths, values, strict=True)]

    def integers(self, name: str) -> list[int]:
        """A list of integers; absent is empty."""
        return self._read(name, as_integers) or []

    def object(self, name: str) -> "JsonFields | None":
        value = self._read(name, as_object)
        return None if value is None else JsonFields(value, f"{self._path}{name}.")

    def items(self) -> Iterable[tuple[str, Any]]:
        """All fields, by name."""
        return self._values.items()

    @property
    def path(self) -> str:
        """The object as errors name it; empty for the body."""
        return self._path.removesuffix(".")

    def field_path(self, name: str) -> str:
        """The field as errors name it."""
        return f"{self._path}{name}"

    def reject_unsupported(self, neutral_values: Mapping[str, Sequence[Any]]) -> None:
        """Rejects the first of these fields whose value is not one of its neutral values."""
        for name, neutral in neutral_values.items():
            if self.has(name) and self._values[name] not in neutral:
                raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served", field=self.field_path(name))

    def _read(self, name: str, read: Callable[[str, Any], T]) -> T | None:
        value = self._values.get(name)
        return None if value is None else read(self.field_path(name), value)


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A parsed body. NaN and infinities, which Python parses and JSON does not have, are NaN in `values`. They are
    rejected by the name of the field that is read, or else for the whole body."""

    values: Mapping[str, Any]
    non_finite: tuple[str, ...]

    def reject_non_finite(self) -> None:
        """Raises QuireError MALFORMED_MESSAGE where a field that was not read has one."""
        if self.non_finite:
            raise QuireError(Reason.MALFORMED_MESSAGE, f"the body is not JSON: it holds {self.non_finite[0]}")


def invalid(where: str, message: str) -> QuireError:
    """The error to raise about a field."""
    return QuireError(Reason.INVALID_FIELD, message, field=where)


def as_number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(where, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise invalid(where, "must be a finite number")
    return number


def as_integer(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(where, "must be an integer")
    return value


def as_flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(where, "must be true or false")
    return value


def as_string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(where, "must be a string")
    return value


def as_list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(where, "must be a list")
    return value


def as_integers(where: str, value: Any) -> list[int]:
    values = as_list(where, value)
    # In one pass in C, as a prompt may have thousands of ids. The type of a bool is bool here.
    if set(map(type, values)) - {int}:
        index = next(index for index, item in enumerate(values) if type(item) is not int)
        raise invalid(f"{where}[{index}]", "must be an integer")
    return values


def as_object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(where, "must be an object")
    return value


def parse_body(data: bytes) -> JsonBody:
    """A body that is a JSON object. Raises QuireError: MALFORMED_MESSAGE, MESSAGE_TOO_LARGE where it has too many
    values, INVALID_FIELD where an object has a key twice, as parsers differ in which value they take."""
    if _has_too_many_tokens(data):
        message = f"the body has more than {MAX_JSON_TOKENS} strings, commas and brackets"
        raise QuireError(Reason.MESSAGE_TOO_LARGE, message)
    constants: list[str] = []
    repeated_keys: dict[int, tuple[dict[str, Any], str]] = {}

    def not_finite(name: str) -> float:
        constants.append(name)
        return math.nan

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated_keys[id(values)] = values, next(key for key in counts if counts[key] > 1)
        return values

    try:
        # Not json.loads(data), which takes UTF-16 and UTF-32 as well: JSON is UTF-8 (RFC 8259).
        values = json.loads(data.decode("utf-8-sig"), parse_constant=not_finite, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise QuireError(Reason.MALFORMED_MESSAGE, "the body is not JSON") from None
    if not isinstance(values, dict):
        raise QuireError(Reason.MALFORMED_MESSAGE, "the body is not a JSON object")
    if repeated_keys:
        raise invalid(_repeated_field(values, repeated_keys), "is there twice")
    return JsonBody(values, tuple(constants))


def _has_too_many_tokens(data: bytes) -> bool:
    if sum(map(data.count, (b"[", b"{", b",", b'"'))) <= MAX_JSON_TOKENS:
        return False
    # Many of these may be text. A loop in Python, other than one call, lets other threads run.
    return any(index == MAX_JSON_TOKENS for index, _ in enumerate(_JSON_TOKEN.finditer(data)))


def _repeated_field(body: dict[str, Any], repeated_keys: Mapping[int, tuple[dict[str, Any], str]]) -> str:
    """The path of a field that its object has twice. `repeated_keys` has each such object, with one key, by its id."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            dotted = f"{path}." if path else ""
            if id(value) in repeated_keys:
                return _printable(dotted + repeated_keys[id(value)][1])
            left += ((dotted + name, item) for name, item in value.items())
        elif isinstance(value, list):
            left += ((f"{path}[{index}]", item) for index, item in enumerate(value))
    raise AssertionError("the outermost object with a repeated key is a part of the body")


def _printable(path: str) -> str:
    """A path whose names are the client's: short, and without halves of surrogate pairs."""
    cut = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}…"
    return cut.encode("utf-8", "backslashreplace").decode()

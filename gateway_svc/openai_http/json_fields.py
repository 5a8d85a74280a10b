"""Reads typed values out of a JSON body; what has another type is refused by the name that the client used."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from svc_common.errors import QuireError, Reason

T = TypeVar("T")


class JsonFields:
    """An object of a body. A field that is null is one that was left out."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """`path` leads to the object, with a dot at its end where it is not the body itself."""
        self._values = values
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The field as it stands, or None."""
        return self._values.get(name)

    def number(self, name: str) -> float | None:
        """A finite number."""
        return self._read(name, as_number)

    def integer(self, name: str) -> int | None:
        """An integer, spelled without fraction or exponent."""
        return self._read(name, as_integer)

    def flag(self, name: str) -> bool:
        """true or false; absent is false."""
        return self._read(name, as_flag) or False

    def string(self, name: str) -> str | None:
        """A string."""
        return self._read(name, as_string)

    def objects(self, name: str) -> list["JsonFields"] | None:
        """A list of objects."""
        values = self._read(name, as_list)
        if values is None:
            return None
        paths = (f"{self._path}{name}[{place}]" for place in range(len(values)))
        return [JsonFields(as_object(path, value), f"{path}.") for path, value in zip(paths, values, strict=True)]

    def integers(self, name: str) -> list[int]:
        """A list of integers; absent is empty."""
        return self._read(name, as_integers) or []

    def object(self, name: str) -> "JsonFields | None":
        """An object."""
        value = self._read(name, as_object)
        return None if value is None else JsonFields(value, f"{self._path}{name}.")

    def items(self) -> Iterable[tuple[str, Any]]:
        """All fields, by name."""
        return self._values.items()

    def field_path(self, name: str) -> str:
        """The field as errors name it."""
        return f"{self._path}{name}"

    def reject_unsupported(self, neutral_values: Mapping[str, Sequence[Any]]) -> None:
        """Refuses the first of these fields that is there with a value that is not among its neutral ones."""
        for name, neutral in neutral_values.items():
            if self.has(name) and self._values[name] not in neutral:
                raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served", field=self.field_path(name))

    def _read(self, name: str, read: Callable[[str, Any], T]) -> T | None:
        value = self._values.get(name)
        return None if value is None else read(self.field_path(name), value)


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A body as it was parsed. NaN and infinities, which Python reads and JSON does not have, are NaN in `values`:
    first to be refused by the name of a field that is read, then altogether."""

    values: Mapping[str, Any]
    non_finite: tuple[str, ...]

    def reject_non_finite(self) -> None:
        """Raises QuireError MALFORMED_MESSAGE where there is any, in a field that nobody read."""
        if self.non_finite:
            raise QuireError(Reason.MALFORMED_MESSAGE, f"the body is not JSON: it holds {self.non_finite[0]}")


def invalid(where: str, message: str) -> QuireError:
    """The error to raise about a field."""
    return QuireError(Reason.INVALID_FIELD, message, field=where)


def as_number(where: str, value: Any) -> float:
    """The value, if it is a finite number."""
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
    """The value, if it is an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(where, "must be an integer")
    return value


def as_flag(where: str, value: Any) -> bool:
    """The value, if it is true or false."""
    if not isinstance(value, bool):
        raise invalid(where, "must be true or false")
    return value


def as_string(where: str, value: Any) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise invalid(where, "must be a string")
    return value


def as_list(where: str, value: Any) -> list[Any]:
    """The value, if it is a list."""
    if not isinstance(value, list):
        raise invalid(where, "must be a list")
    return value


def as_integers(where: str, value: Any) -> list[int]:
    """The value, if it is a list of integers."""
    values = as_list(where, value)
    # In one pass of C for the list of thousands that a prompt may be; bool is its own type here.
    if set(map(type, values)) - {int}:
        place = next(place for place, item in enumerate(values) if type(item) is not int)
        raise invalid(f"{where}[{place}]", "must be an integer")
    return values


def as_object(where: str, value: Any) -> dict[str, Any]:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise invalid(where, "must be an object")
    return value


def parse_body(data: bytes) -> JsonBody:
    """A body that is a JSON object. Raises QuireError MALFORMED_MESSAGE."""
    constants: list[str] = []

    def not_finite(name: str) -> float:
        constants.append(name)
        return math.nan

    try:
        values = json.loads(data, parse_constant=not_finite)
    except (ValueError, RecursionError):
        raise QuireError(Reason.MALFORMED_MESSAGE, "the body is not JSON") from None
    if not isinstance(values, dict):
        raise QuireError(Reason.MALFORMED_MESSAGE, "the body is not a JSON object")
    return JsonBody(values, tuple(constants))

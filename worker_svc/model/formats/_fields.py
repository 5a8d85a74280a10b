"""Fields of a model's `quantization_config`. Each error names the field, and says what it must be."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from worker_svc.errors import UnsupportedModel

_MOST = 2**31  # of inputs or outputs


class Fields:
    """The fields of an object that describes a format. Null is as missing."""

    def __init__(self, content: Mapping[str, Any], path: str = "quantization_config") -> None:
        self._content, self._path = content, path

    def refuse(self, name: str, must_be: str) -> UnsupportedModel:
        """The error that a field has a value which is not supported."""
        found = self._content.get(name)
        return UnsupportedModel(f"{self._path}.{name}: must be {must_be}, not {found!r}")

    def has(self, *names: str) -> str | None:
        """The first of these names of one field that is present, or None."""
        return next((name for name in names if self._content.get(name) is not None), None)

    def one_of(self, choices: Collection[int], *names: str) -> int:
        """A whole number among `choices`; `names` are those that the field has in files."""
        name = self.has(*names) or names[0]
        value = self._content.get(name)
        # JSON's true is no number.
        if type(value) is not int or value not in choices:
            raise self.refuse(name, _either(sorted(choices)))
        return value

    def group_size(self, *names: str) -> int | None:
        """The number of inputs in a group; None: all inputs are one group."""
        name = self.has(*names) or names[0]
        value = self._content.get(name)
        if type(value) is not int or not (0 < value <= _MOST or value == -1):
            raise self.refuse(name, "a positive number of inputs, or -1")
        return None if value == -1 else value

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self._content.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return default if value is None else value

    def word(self, name: str, choices: Collection[str], default: str | None = None) -> str:
        """A name among `choices`, which are in lower case, in letters of any case. Without a default it is needed."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value.lower() not in choices:
            raise self.refuse(name, _either(sorted(choices)))
        return value.lower()

    def text(self, name: str, default: str) -> str:
        """A name of any kind, in lower case."""
        value = self._content.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "a name")
        return default if value is None else value.lower()

    def is_list(self, name: str) -> bool:
        return isinstance(self._content.get(name), list)

    def block(self, name: str) -> tuple[int, int] | None:
        """The numbers of outputs and inputs in a block; None: the field is missing."""
        value = self._content.get(name)
        if value is None:
            return None
        sizes = value if isinstance(value, list) else []
        if len(sizes) != 2 or not all(type(size) is int and 0 < size <= _MOST for size in sizes):
            raise self.refuse(name, "two positive numbers, of outputs and inputs")
        return sizes[0], sizes[1]

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty if it is missing."""
        value = self._content.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.refuse(name, "a list of texts")
        return value or []

    def pattern(self, name: str, text: str) -> re.Pattern[str]:
        """A regular expression that the field has."""
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            shown = text if len(text) <= 80 else f"{text[:80]}…"
            raise UnsupportedModel(f"{self._path}.{name}: {shown!r} is no regular expression: {error}") from error

    def names(self, name: str) -> list[Any]:
        """A list of names of layers, or of lists of them; empty if it is missing."""
        value = self._content.get(name)
        if value is not None and not _are_names(value):
            raise self.refuse(name, "a list of names")
        return value or []

    def object(self, name: str) -> "Fields":
        """The fields of an object."""
        return Fields(self.mapping(name), f"{self._path}.{name}")

    def objects(self, name: str) -> "list[Fields]":
        """The fields of each object in an object."""
        found = Fields(self.mapping(name), f"{self._path}.{name}")
        return [found.object(each) for each in found._content]

    def listed(self, name: str) -> "list[Fields]":
        """The fields of each object in a list, or of the one object; empty if it is missing."""
        value = self._content.get(name)
        if isinstance(value, dict):
            return [self.object(name)]
        if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            raise self.refuse(name, "a list of objects")
        return [Fields(each, f"{self._path}.{name}[{number}]") for number, each in enumerate(value or [])]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if it is missing."""
        value = self._content.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return value or {}


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) or _are_names(each) for each in value)


def _either(choices: list[Any]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last

"""Conversions of the values of vLLM's flags. They raise ValueError with what the value must be."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {"": 1, **{unit: 1000 ** (power + 1) for power, unit in enumerate("kmgt")}}
_UNITS |= {unit.upper(): 1024 ** (power + 1) for power, unit in enumerate("kmgt")}


def size(text: str) -> str:
    """A whole number, with k, m, g or t for powers of 1000 and K, M, G or T for powers of 1024, as in vLLM."""
    match = _SIZE.fullmatch(text)
    number = None if match is None else Decimal(match[1]) * _UNITS[match[2]]
    if number is None or number != int(number):
        raise ValueError("must be a whole number, such as 4096, 4k or 4K")
    return str(int(number))


def up_to(most: int) -> Callable[[str], str]:
    """A conversion of whole numbers from 0 to `most`."""

    def convert(text: str) -> str:
        if not (text.isascii() and text.isdigit() and int(text) <= most):
            raise ValueError(f"must be a whole number from 0 to {most}")
        return text

    return convert


def size_or_unset(text: str) -> str:
    """As `size`; empty, which is unset, for `auto` and -1."""
    return "" if text in ("auto", "-1") else size(text)


@dataclass(frozen=True, slots=True)
class OneOf:
    """A conversion of names to other ones. With `others`, a name that is not among them stays as it is."""

    names: Mapping[str, str]
    others: bool = False

    @property
    def choices(self) -> Sequence[str]:
        """All texts that it takes; empty where there are others."""
        return () if self.others else tuple(self.names)

    def __call__(self, text: str) -> str:
        if text not in self.names and not self.others:
            raise ValueError(f"must be one of {', '.join(self.names)}")
        return self.names.get(text, text)


def origins(text: str) -> str:
    """A JSON list of strings, joined by commas."""
    found = from_json(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("must be a JSON list of strings")
    return ",".join(found)


def from_json(text: str, otherwise: Any = None) -> Any:
    """The value of a JSON text; `otherwise` where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise

"""Fields of bodies, and of the option objects in them, that no API defines, as far as this gateway knows: new clients
send new ones."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import cache
from typing import Any

from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.json_body import invalid, printable

IGNORED_FIELDS_HEADER = "x-quire-ignored-fields"

_MAX_UNDEFINED = 64  # of one body: comparing them with known names takes a few milliseconds
_MAX_NAME = 64
_MAX_EDITS = 2
_MAX_HEADER = 1_024
_NOT_IN_HEADER = re.compile(r"[^A-Za-z0-9_.-]")


class UndefinedFields(StrEnum):
    """What a gateway does about them. A null counts as absent."""

    REFUSE = "refuse"
    WARN = "warn"
    """A name that is nearly that of a known field is refused; the answer's header names others."""
    IGNORE = "ignore"

    def check(self, model: type[BodyModel], values: Mapping[str, Any]) -> Sequence[str]:
        """The names of fields that are ignored, of which the answer informs. Raises QuireError."""
        if self is UndefinedFields.IGNORE:
            return ()
        undefined: list[str] = []
        objects: list[tuple[str, type[BodyModel], Mapping[str, Any]]] = [("", model, values)]
        for path, kind, fields in objects:
            present = {name for name, value in fields.items() if value is not None}
            for name in fields:
                if name in present and name not in kind.known_fields():
                    if len(undefined) == _MAX_UNDEFINED:
                        message = f"is not a known field, and the body has more than {_MAX_UNDEFINED} of them"
                        raise invalid(printable(path + name), message)
                    undefined.append(path + name)
                    self._check_one(kind, path, name, present)
            objects += (
                (f"{path}{name}.", option, fields[name])
                for name, option in kind.option_objects().items()
                if isinstance(fields.get(name), dict)
            )
        return undefined

    def _check_one(self, model: type[BodyModel], path: str, name: str, present: AbstractSet[str]) -> None:
        """Raises QuireError unless a field is ignored. `present` has the fields of the same object, none of which a
        misspelt one can mean."""
        meant = near_miss(name, model.known_fields(), present)
        if meant is None:
            if self is UndefinedFields.REFUSE:
                raise invalid(printable(path + name), "is not a known field")
        elif meant in model.unserved:
            raise invalid(printable(path + name), f"is not a known field (and {meant} is not served)")
        else:
            raise invalid(printable(path + name), f"is not a known field: did you mean {meant}?")


def header_value(names: Sequence[str]) -> str:
    """Names for the header: separated by commas, in ASCII, at most 1,024 characters. Other characters become ?."""
    value = ", ".join(_NOT_IN_HEADER.sub("?", name[:_MAX_NAME]) for name in names)
    return value if len(value) <= _MAX_HEADER else f"{value[: _MAX_HEADER - 3]}..."


def near_miss(name: str, known: frozenset[str], present: AbstractSet[str] = frozenset()) -> str | None:
    """The known field that is meant: the nearest one within two edits that is not `present`, or None. Case does not
    count. Known names of 4 and 5 characters allow one edit, shorter ones none: too many other words are as near."""
    if len(name) > _MAX_NAME:
        return None
    name = name.lower()
    characters = frozenset(name)
    by_length = _by_length(known)
    near: list[tuple[int, str]] = []
    for length in range(len(name) - _MAX_EDITS, len(name) + _MAX_EDITS + 1):
        most = _most_edits(length)
        for other, its_characters in by_length.get(length, ()):
            # An edit adds one character and removes one at most. Few names are compared further.
            if len(characters ^ its_characters) > 2 * most or other in present:
                continue
            if (distance := num_edits(name, other, most)) is not None:
                near.append((distance, other))
    return min(near)[1] if near else None


@cache
def _by_length(known: frozenset[str]) -> Mapping[int, Sequence[tuple[str, frozenset[str]]]]:
    """The known names of each length, each with its characters."""
    names: defaultdict[int, list[tuple[str, frozenset[str]]]] = defaultdict(list)
    for name in known:
        names[len(name)].append((name, frozenset(name)))
    return names


def _most_edits(length: int) -> int:
    return _MAX_EDITS if length > 5 else 1 if length > 3 else 0


def num_edits(left: str, right: str, most: int) -> int | None:
    """How many characters are to be inserted, removed, replaced or swapped with the next one; None: more than
    `most`."""
    before: list[int] = []
    last = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        row = [i]
        for j, b in enumerate(right, 1):
            edits = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                edits = min(edits, before[j - 2] + 1)
            row.append(edits)
        if min(row) > most:  # so is each of the rows that follow
            return None
        before, last = last, row
    return last[-1] if last[-1] <= most else None

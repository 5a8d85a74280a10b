"""The schemas within a JSON Schema, and what llguidance leaves out of its formats."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

WITH_VALUES = ("const", "enum", "default", "examples", "example", "dependentRequired")
"""Keywords that hold values."""

WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords that hold schemas by name: such a name may be that of a keyword."""

ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
"""Keywords that restrict nothing."""

_DATES = ("date", "date-time")
# llguidance counts the days of each month, but allows 29 February in every year. RFC 3339 has the year 0, a leap year.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_NOT_29_FEBRUARY = "[0-9]{4}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))"
DAY_OF_ITS_YEAR = f"({_NOT_29_FEBRUARY}|{_LEAP_YEAR}-02-29)"
"""A regular expression for the beginning of a date, by which 29 February is a day of leap years only."""


def child_pointer(pointer: str, key: str) -> str:
    """The JSON pointer of a key's value in the object at a pointer."""
    return f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"


def schema_parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and the schemas within it, with their JSON pointers. Unknown keywords may hold some: a `$ref` may refer
    to them."""
    left: list[tuple[str, Any]] = [("#", schema)]
    while left:
        path, value = left.pop()
        if isinstance(value, list):
            left += ((f"{path}/{index}", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            yield path, value
            for keyword, item in value.items():
                where = child_pointer(path, keyword)
                if keyword in WITH_NAMES and isinstance(item, dict):
                    left += ((child_pointer(where, name), part) for name, part in item.items())
                elif keyword not in WITH_VALUES:
                    left.append((where, item))


class UniqueKeys:
    """A hook for `json.loads` that finds objects with a key twice, of which a dict keeps the last."""

    def __init__(self) -> None:
        self._repeated: dict[int, str] = {}
        # As long as they are kept, no other object has the id of one.
        self._objects: list[dict[str, Any]] = []

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            self._repeated[id(values)] = Counter(key for key, _ in pairs).most_common(1)[0][0]
            self._objects.append(values)
        return values

    def repeated_in(self, value: Any) -> str | None:
        """The JSON pointer of a key that is twice in its object; None if there is none."""
        left = [("#", value)] if self._repeated else []
        while left:
            pointer, value = left.pop()
            if isinstance(value, list):
                left += ((f"{pointer}/{index}", item) for index, item in enumerate(value))
            elif isinstance(value, dict):
                if id(value) in self._repeated:
                    return child_pointer(pointer, self._repeated[id(value)])
                left += ((child_pointer(pointer, key), item) for key, item in value.items())
        return None


def restrict_dates(schema: dict[str, Any]) -> None:
    """Adds a pattern beside each `format` of a date, in place, by which 29 February is a day of leap years only."""
    for _, part in schema_parts(schema):
        others = part.get("allOf", [])
        if part.get("format") in _DATES and isinstance(others, list):
            part["allOf"] = [*others, {"pattern": f"^{DAY_OF_ITS_YEAR}"}]


def unsupported_keyword(schema: dict[str, Any]) -> str | None:
    """What is wrong with a keyword that llguidance would take for something else; None: nothing."""
    for path, part in schema_parts(schema):
        # Names of properties that the schema does not list can be repeated, and a repeated one counts once.
        least, required = part.get("minProperties"), part.get("required")
        listed = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if isinstance(least, int) and least - listed > 1:
            return (
                f"at {path}/minProperties: the keyword is not supported: it is at most one more than the number of "
                "required properties"
            )
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(part.get(keyword), bool):  # as in draft 4
                return f"at {path}/{keyword}: must be a number"
    return None


def endless_reference(schema: dict[str, Any]) -> str | None:
    """The JSON pointer of a reference to a schema that says nothing but that a value matches one of such references;
    None if there is none. llguidance admits what comes before the value, and then nothing."""
    parts = dict(schema_parts(schema))
    num_needed = Counter[str]()  # of each part and list of options: what must end before it ends
    needed_by: defaultdict[str, list[str]] = defaultdict(list)
    for pointer, part in parts.items():
        needs = [reference] if (reference := _reference(part)) in parts else []
        needs += [one for one in _listed(pointer, part, "allOf") if one in parts]
        for keyword in ("anyOf", "oneOf"):
            options, place = _listed(pointer, part, keyword), f"{pointer}/{keyword}"
            if options and parts.keys() >= set(options):  # others are true or false
                needs.append(place)
                num_needed[place] = 1
                for option in options:
                    needed_by[option].append(place)
        num_needed[pointer] = len(needs)
        for need in needs:
            needed_by[need].append(pointer)
    ended = [pointer for pointer in parts if not num_needed[pointer]]
    while ended:
        for user in needed_by[ended.pop()]:
            num_needed[user] -= 1
            if num_needed[user] == 0:
                ended.append(user)
    return next((f"{pointer}/$ref" for pointer, part in parts.items() if num_needed[_reference(part)] > 0), None)


def _listed(pointer: str, part: dict[str, Any], keyword: str) -> list[str]:
    """The JSON pointers of the schemas in a list."""
    schemas = part.get(keyword)
    return [f"{pointer}/{keyword}/{index}" for index in range(len(schemas))] if isinstance(schemas, list) else []


def _reference(schema: dict[str, Any]) -> str:
    """That of a schema; empty: it has none."""
    reference = schema.get("$ref")
    return reference if isinstance(reference, str) else ""

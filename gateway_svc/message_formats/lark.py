"""Literals, regular expressions and JSON in the Lark syntax of llguidance."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway_svc.json_schemas import ANNOTATIONS, WITH_NAMES, WITH_VALUES, restrict_dates
from svc_common.grammars import JSON_ON_ONE_LINE

MAX_OTHERS = 64
"""Properties that a schema does not list."""


def quoted(text: str) -> str:
    """A literal in Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def escaped_regex(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.sub(r"[\\^$.|?*+()\[\]{}/]", r"\\\g<0>", text)


def json_rule(schema: Mapping[str, Any], options: Mapping[str, Any] = JSON_ON_ONE_LINE) -> str:
    """JSON of a schema. `options` are llguidance's."""
    written = {**_without_annotations(schema), "x-guidance": options}
    restrict_dates(written)
    return f"%json {json.dumps(written, ensure_ascii=False, separators=(',', ':'))}"


def in_order(name: str, parts: Sequence[tuple[str, bool]], other: str, separator: str) -> dict[str, str]:
    """Rules of which that of `name` is a list: these parts in their order, each once, where True stands beside it, or
    at most once; then any number of `other`, if that is not empty."""
    rules = {name: f"{name}_from_0"}
    between = quoted(separator)
    for index, (part, is_required) in enumerate(parts):
        then = f"{name}_more_{index + 1}"
        # The parts from this one on: the first ones of the list, or more of them.
        rules[f"{name}_from_{index}"] = f"{part} {then}" + ("" if is_required else f" | {name}_from_{index + 1}")
        rules[f"{name}_more_{index}"] = f"({between} {part}){'' if is_required else '?'} {then}"
    first = f"({other} ({between} {other}){{0,{MAX_OTHERS - 1}}})?" if other else '""'
    more = f"({between} {other}){{0,{MAX_OTHERS}}}" if other else '""'
    return {**rules, f"{name}_from_{len(parts)}": first, f"{name}_more_{len(parts)}": more}


def other_keys(pattern: str, listed: Iterable[str]) -> str:
    """Names that match a pattern and are not listed."""
    names = "|".join(map(escaped_regex, listed))
    return f"/{pattern}/ & ~/{names}/" if names else f"/{pattern}/"


def _without_annotations(schema: Any) -> Any:
    """The same schema without what does not restrict values: descriptions may be most of it."""
    if isinstance(schema, list):
        return [_without_annotations(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        keyword: value
        if keyword in WITH_VALUES
        else {name: _without_annotations(part) for name, part in value.items()}
        if keyword in WITH_NAMES and isinstance(value, Mapping)
        else _without_annotations(value)
        for keyword, value in schema.items()
        if keyword not in ANNOTATIONS
    }

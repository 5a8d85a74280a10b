"""Literals, regular expressions and JSON in the Lark syntax of llguidance."""

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway_svc.json_schemas import ANNOTATIONS, WITH_NAMES, WITH_VALUES, restrict_dates
from svc_common.grammars import JSON_ON_ONE_LINE


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

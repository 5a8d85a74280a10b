"""Rules of a grammar for the arguments of one tool."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gateway_svc.json_schemas import WITH_NAMES, WITH_VALUES, restrict_dates
from gateway_svc.message_formats.description import Tool, XmlCalls
from gateway_svc.message_formats.layout import python_literal
from gateway_svc.message_formats.schema_types import resolve_reference
from svc_common.grammars import JSON_ON_ONE_LINE

_DEFINITIONS = ("$defs", "definitions")
_COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties")
# Of a string that is not written as JSON, llguidance can check nothing.
_UNSUPPORTED = ("pattern", "not", "allOf", "if")
# Keywords that restrict nothing.
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
_MAX_DEPTH = 16
# Names of parameters as the parsers take them.
_TAG_NAME = re.compile(r"[^\s<>]([^<>\n]*[^\s<>])?")
_KEYWORD = re.compile(r"[\w.-]+")
_ARGUMENTS_ID = "https://quire.invalid/arguments"
_MAX_OTHERS = 64  # properties that the schema does not list


class UnsupportedParameters(Exception):  # noqa: N818
    """Parameters that a format cannot write under a grammar. The text is for the client: it names them."""


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
        if keyword not in _ANNOTATIONS
    }


def object_rule(tool: Tool) -> str:
    """The arguments of a tool as JSON. Raises UnsupportedParameters."""
    _check_type(tool)
    return json_rule(_closed(tool.parameters))


def json_call_rule(tool: Tool, arguments_key: str, options: Mapping[str, Any]) -> str:
    """A whole call as JSON. Raises UnsupportedParameters."""
    _check_type(tool)
    # With an id of its own, references of the tool's schema are relative to it.
    arguments = {"$id": _ARGUMENTS_ID, **_closed(tool.parameters)}
    return json_rule(
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: arguments},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        },
        options,
    )


def _check_type(tool: Tool) -> None:
    kinds = tool.parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise UnsupportedParameters(f"parameters of {tool.name}: type must be object")


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of objects, without properties that it does not list: models would invent some."""
    typed = {**schema, "type": "object"}
    if any(keyword in schema for keyword in _COMBINING):
        return typed
    return {"additionalProperties": False, **typed}


def tag_rules(calls: XmlCalls, tool: Tool, name: str) -> dict[str, str]:
    """Rules for parameters in tags: in the order of the schema, each once, optional ones or not; then any others, if
    the schema's `additionalProperties` allows them.

    Raises UnsupportedParameters.
    """
    properties = _properties(tool, _TAG_NAME)
    required = tool.parameters.get("required")
    rules = {}
    parts = []
    for index, (parameter, schema) in enumerate(properties.items()):
        rule = f"{name}_{index}"
        is_required = isinstance(required, list) and parameter in required
        parts.append(rule if is_required else f"{rule}?")
        value = _Values(tool.parameters, f"parameters of {tool.name}: {parameter}")
        value.add(schema, 0)
        opening, closing = f"{calls.parameter}{parameter}>\n", f"{calls.parameter_end}\n"
        if value.is_any_text:
            rules[rule] = f'{quoted(opening)} {rule}_text "\\n"'
            rules[f"{rule}_text[lazy]"] = f"/(?s:.*){escaped_regex(calls.parameter_end)}/"
        else:
            rules[rule] = f"{quoted(opening)} {rule}_value {quoted(chr(10) + closing)}"
            rules[f"{rule}_value"] = " | ".join(value.alternatives)
    if _allows_others(tool.parameters):
        parts.append(f"{name}_other{{0,{_MAX_OTHERS}}}")
        rules[f"{name}_other"] = f'{quoted(calls.parameter)} {_key_name(name)} ">\\n" {name}_other_text "\\n"'
        rules[f"{name}_other_text[lazy]"] = f"/(?s:.*){escaped_regex(calls.parameter_end)}/"
        rules[_key_name(name)] = _other_keys(r"[^<>\n]{1,64}", properties)
    return {name: " ".join(parts) or '""', **rules}


def keyword_rules(tool: Tool, name: str) -> dict[str, str]:
    """Rules for keyword arguments: in the order of the schema, each once, optional ones or not; then any others, if
    the schema's `additionalProperties` allows them.

    Values within lists and objects are JSON, which the parser takes as it takes Python. Raises UnsupportedParameters.
    """
    properties = _properties(tool, _KEYWORD)
    required = tool.parameters.get("required")
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    rules = {name: f"{name}_from_0"}
    index = 0
    for index, (key, schema) in enumerate(properties.items(), 1):
        rule, then = f"{name}_{index - 1}", f"{name}_more_{index}"
        is_required = isinstance(required, list) and key in required
        # The arguments from this one on: the first ones of the call, or more of them.
        rules[f"{name}_from_{index - 1}"] = f"{rule} {then}" + ("" if is_required else f" | {name}_from_{index}")
        rules[f"{name}_more_{index - 1}"] = f'(", " {rule}){"" if is_required else "?"} {then}'
        rules[rule] = f"{quoted(f'{key}=')} {rule}_value"
        rules[f"{rule}_value"] = " | ".join(_python_values(schema, definitions))
    first, more = '""', '""'
    if _allows_others(tool.parameters):
        more = f'(", " {name}_other){{0,{_MAX_OTHERS}}}'
        first = f'({name}_other (", " {name}_other){{0,{_MAX_OTHERS - 1}}})?'
        rules[f"{name}_other"] = f'{_key_name(name)} "=" {name}_other_value'
        rules[f"{name}_other_value"] = " | ".join(('"True"', '"False"', '"None"', *_python_values({}, {})))
        rules[_key_name(name)] = _other_keys("[A-Za-z_][A-Za-z0-9_]{0,63}", properties)
    return {**rules, f"{name}_from_{index}": first, f"{name}_more_{index}": more}


def _properties(tool: Tool, name: re.Pattern[str]) -> Mapping[str, Any]:
    """The listed properties of a tool's arguments, whose names match a pattern. Raises UnsupportedParameters."""
    _check_type(tool)
    where = f"parameters of {tool.name}"
    for keyword in _COMBINING:
        if keyword in tool.parameters:
            raise UnsupportedParameters(f"{where}: {keyword} is not supported with this model's calls")
    properties = tool.parameters.get("properties")
    listed: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    for key in listed:
        if not name.fullmatch(key):
            raise UnsupportedParameters(f"{where}: the name {key!r} is not supported with this model's calls")
    return listed


def _allows_others(parameters: Mapping[str, Any]) -> bool:
    """Whether properties that are not listed are allowed expressly. Of what value they are is left open."""
    return parameters.get("additionalProperties", False) is not False


def _key_name(name: str) -> str:
    """The name of the terminal for names of properties."""
    return f"{name}_key".upper()


def _other_keys(pattern: str, listed: Iterable[str]) -> str:
    """Names of properties that are not listed."""
    names = "|".join(map(escaped_regex, listed))
    return f"/{pattern}/ & ~/{names}/" if names else f"/{pattern}/"


def _python_values(schema: Any, definitions: Mapping[str, Any]) -> list[str]:
    """The alternatives of a value."""
    if not isinstance(schema, Mapping):
        return [json_rule({})]
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        return [value for option in options for value in _python_values(option, definitions)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return [quoted(python_literal(value)) for value in values]
    match schema.get("type"):
        case "boolean":
            return ['"True"', '"False"']
        case "null":
            return ['"None"']
        case list(kinds):
            kind_schemas = ({**schema, "type": kind} for kind in kinds)
            return [value for one in kind_schemas for value in _python_values(one, definitions)]
        case _:
            # An escaped slash has another meaning in Python.
            return [json_rule({**definitions, **schema}, {**JSON_ON_ONE_LINE, "json_allowed_escapes": 'nrtbf\\"u'})]


class _Values:
    """The texts that may stand for a value: any, or one of some alternatives."""

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        self._root = root
        self._where = where
        self.is_any_text = False
        self.alternatives: list[str] = []

    def add(self, schema: Any, depth: int) -> None:
        """Adds the values of a schema."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            self.is_any_text = True
            return
        if isinstance(reference := schema.get("$ref"), str):
            self.add(resolve_reference(reference, self._root), depth + 1)
            return
        options = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(options, list):
            for option in options:
                self.add(option, depth + 1)
            return
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            self.alternatives += (quoted(value if isinstance(value, str) else json.dumps(value)) for value in values)
            return
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        if None in kinds or "string" in kinds:
            self._check_text(schema)
            self.is_any_text = True
            return
        self.alternatives.append(json_rule({**self._definitions, **schema}))

    def _check_text(self, schema: Mapping[str, Any]) -> None:
        for keyword in (*_UNSUPPORTED, "minLength", "maxLength"):
            if keyword in schema:
                raise UnsupportedParameters(f"{self._where}: {keyword} is not supported with this model's calls")

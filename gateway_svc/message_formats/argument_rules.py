"""Rules of a grammar for the arguments of one tool."""

import re
from collections.abc import Mapping
from typing import Any

from gateway_svc.json_schemas import unsupported_keyword
from gateway_svc.message_formats.brace_values import BraceValues
from gateway_svc.message_formats.description import BraceCalls, Tool, XmlCalls
from gateway_svc.message_formats.lark import MAX_OTHERS, in_order, json_rule, other_keys, quoted
from gateway_svc.message_formats.layout import BRACE_KEY, python_literal
from gateway_svc.message_formats.parameter_values import UnsupportedParameters, parameter_place, values_of
from gateway_svc.message_formats.schema_types import ALL_TYPES
from gateway_svc.message_formats.tag_values import Literal, tag_value_rules
from svc_common.grammars import JSON_ON_ONE_LINE

_COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties")
# What else may stand beside properties, and is about several parameters at once.
_COUNTING = ("minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies")
# Names of parameters as the parsers take them.
_TAG_NAME = re.compile(r"[^\s<>\"]([^<>\"\n]*[^\s<>\"])?")
_KEYWORD = re.compile(r"[\w.-]+")
_ARGUMENTS_ID = "https://quire.invalid/arguments"


def object_rule(tool: Tool) -> str:
    """The arguments of a tool as JSON. Raises UnsupportedParameters."""
    _check_schema(tool)
    return json_rule(_closed(tool))


def json_call_rule(tool: Tool, arguments_key: str, options: Mapping[str, Any]) -> str:
    """A whole call as JSON. Raises UnsupportedParameters."""
    _check_schema(tool)
    # With an id of its own, references of the tool's schema are relative to it.
    arguments = {"$id": _ARGUMENTS_ID, **_closed(tool)}
    return json_rule(
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: arguments},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        },
        options,
    )


def _check_schema(tool: Tool) -> None:
    where = f"parameters of {tool.name}"
    kinds = tool.parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise UnsupportedParameters(f"{where}: type must be object")
    if problem := unsupported_keyword(dict(tool.parameters)):
        raise UnsupportedParameters(f"{where}: {problem}")


def _closed(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments, without properties that it does not list: models would invent some. Raises
    UnsupportedParameters."""
    typed = {**tool.parameters, "type": "object"}
    if any(keyword in typed for keyword in (*_COMBINING, "additionalProperties")):
        return typed
    listed = _listed(tool)
    for key in _required(tool):
        if key not in listed:
            raise _not_listed(tool, key)
    return {"additionalProperties": False, **typed}


def tag_rules(calls: XmlCalls, tool: Tool, name: str, literal: Literal) -> dict[str, str]:
    """Rules for parameters in tags: in the order of the schema, each once, optional ones or not; then any others, if
    the schema's `additionalProperties` allows them. `literal` is how the grammar writes a text with markers.

    Raises UnsupportedParameters.
    """
    properties, required = _properties(tool, _TAG_NAME), _required(tool)
    rules: dict[str, str] = {}
    parts = []
    for index, (parameter, schema) in enumerate(properties.items()):
        rule = f"{name}_{index}"
        parts.append(rule if parameter in required else f"{rule}?")
        rules |= tag_value_rules(calls, tool, parameter, schema, rule, literal)
        rules[rule] = f"{literal(calls.opening(parameter))} {rule}_value"
    if _allows_others(tool.parameters):
        parts.append(f"{name}_other{{0,{MAX_OTHERS}}}")
        others = tool.parameters["additionalProperties"]
        rules |= tag_value_rules(calls, tool, None, others, f"{name}_other", literal)
        parts_of_other = (literal(calls.parameter), _key_name(name), literal(calls.after_key), f"{name}_other_value")
        rules[f"{name}_other"] = " ".join(parts_of_other)
        rules[_key_name(name)] = other_keys(r"[^<>\"\n]{1,64}", properties)
    return {name: " ".join(parts) or '""', **rules}


def keyword_rules(tool: Tool, name: str) -> dict[str, str]:
    """Rules for keyword arguments: in the order of the schema, each once, optional ones or not; then any others, if
    the schema's `additionalProperties` allows them.

    Values within lists and objects are JSON, which the parser takes as it takes Python. Raises UnsupportedParameters.
    """
    properties, required = _properties(tool, _KEYWORD), _required(tool)
    rules, parts, other = {}, [], ""
    for index, (key, schema) in enumerate(properties.items()):
        rule = f"{name}_{index}"
        parts.append((rule, key in required))
        rules[rule] = f"{quoted(f'{key}=')} {rule}_value"
        rules[f"{rule}_value"] = _python_values(tool, key, schema)
    if _allows_others(tool.parameters):
        other = f"{name}_other"
        rules[other] = f'{_key_name(name)} "=" {other}_value'
        rules[f"{other}_value"] = _python_values(tool, None, tool.parameters["additionalProperties"])
        rules[_key_name(name)] = other_keys("[A-Za-z_][A-Za-z0-9_]{0,63}", properties)
    return {**in_order(name, parts, other, ", "), **rules}


def brace_rules(calls: BraceCalls, tool: Tool, name: str, literal: Literal) -> dict[str, str]:
    """Rules for arguments in braces, in the same order. Raises UnsupportedParameters."""
    properties, required = _properties(tool, BRACE_KEY), _required(tool)
    values = BraceValues(calls, tool.parameters, literal)
    rules: dict[str, str] = {}
    parts, other = [], ""
    for index, (key, schema) in enumerate(properties.items()):
        rule = f"{name}_{index}"
        parts.append((rule, key in required))
        rules[rule] = f"{quoted(f'{key}:')} {rule}_value"
        rules |= values.rules(schema, f"{rule}_value", parameter_place(tool, key))
    if _allows_others(tool.parameters):
        other = f"{name}_other"
        others = tool.parameters["additionalProperties"]
        rules |= values.other_rules(other, others, properties, parameter_place(tool, None))
    return {**in_order(name, parts, other, ","), **rules}


def _properties(tool: Tool, name: re.Pattern[str]) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by their names, which match a pattern. Raises UnsupportedParameters."""
    _check_schema(tool)
    where = f"parameters of {tool.name}"
    for keyword in (*_COMBINING, *_COUNTING):
        if keyword in tool.parameters:
            raise UnsupportedParameters(f"{where}: {keyword} is not supported with this model's calls")
    listed = _listed(tool)
    for key in _required(tool):
        if key not in listed and not _allows_others(tool.parameters):
            raise _not_listed(tool, key)
        listed.setdefault(key, tool.parameters.get("additionalProperties"))
    for key in listed:
        if not name.fullmatch(key):
            raise UnsupportedParameters(f"{where}: the name {key!r} is not supported with this model's calls")
    return listed


def _listed(tool: Tool) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    return dict(properties) if isinstance(properties, Mapping) else {}


def _not_listed(tool: Tool, key: str) -> UnsupportedParameters:
    return UnsupportedParameters(f"parameters of {tool.name}: required names {key!r}, which is not in properties")


def _required(tool: Tool) -> list[str]:
    names = tool.parameters.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedParameters(f"parameters of {tool.name}: required must be an array of strings")
    return names


def _allows_others(parameters: Mapping[str, Any]) -> bool:
    """Whether properties that are not listed are allowed expressly. Of what value they are is left open."""
    return parameters.get("additionalProperties", False) is not False


def _key_name(name: str) -> str:
    """The name of the terminal for names of properties."""
    return f"{name}_key".upper()


def _python_values(tool: Tool, parameter: str | None, schema: Any) -> str:
    """The body of a rule for a value; without a name, of one that the schema does not list."""
    values = values_of(schema, tool.parameters, ALL_TYPES, parameter_place(tool, parameter))
    alternatives = [quoted(python_literal(value)) for value in values.constants]
    for typed in values.typed:
        words = {"boolean": ('"True"', '"False"'), "null": ('"None"',)}
        alternatives += (word for kind in sorted(words.keys() & typed.types) for word in words[kind])
        if others := typed.types - words.keys():
            # An escaped slash has another meaning in Python.
            options = {**JSON_ON_ONE_LINE, "json_allowed_escapes": 'nrtbf\\"u'}
            alternatives.append(json_rule(typed.of(others).schema, options))
    return " | ".join(alternatives)

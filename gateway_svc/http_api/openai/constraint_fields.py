"""Constraints on the output in HTTP bodies: fields of OpenAI, vLLM, SGLang and llama.cpp."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway_svc.constraint_checks import check_length
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.constraint_models import ConstraintBody, StructuredOutputs
from svc_common.errors import QuireError, Reason


@dataclass(frozen=True, slots=True)
class ConstraintField:
    """A constraint and the names that its body has for its fields."""

    constraint: UnvalidatedConstraint
    path: str
    names: Mapping[str, str] = field(default_factory=dict)


_Given = tuple[str, Any]
"""A field's path and its value."""


def read_constraint(body: ConstraintBody) -> ConstraintField | None:
    """The constraint of a body, or None. Raises QuireError where it has two."""
    given = [
        *_response_format(body),
        *structured_outputs(body.structured_outputs),
        *_guided(body),
        *_other_servers(body),
    ]
    return only_constraint(given)


def only_constraint(given: Sequence[ConstraintField]) -> ConstraintField | None:
    """The constraint of a body that gives these. Raises QuireError for two."""
    if len(given) > 1:
        raise invalid(given[1].path, f"is given beside {given[0].path}: a request has one constraint")
    return given[0] if given else None


def refuse_beside_named_tool(body: ConstraintBody) -> None:
    """Raises QuireError where a body that names a tool to call has one of vLLM's constraints, as vLLM does. A
    `response_format` has no effect there.
    """
    for given in (*structured_outputs(body.structured_outputs), *_guided(body)):
        message = "is not served beside the name of a tool to call: the answer is this call"
        raise QuireError(Reason.FEATURE_UNSUPPORTED, message, field=given.path)


def _response_format(body: ConstraintBody) -> list[ConstraintField]:
    """OpenAI's field. `schema` beside the type is llama.cpp's spelling."""
    form = body.response_format
    if form is None:
        return []
    where = "response_format"
    match form.type:
        case "text":
            return []
        case "json_object" if form.schema_ is None:
            return [_named(UnvalidatedConstraint(Field.JSON_OBJECT), f"{where}.type")]
        case "json_object" | "json_schema":
            described = form.json_schema if form.schema_ is None else form
            if described is None:
                raise invalid(f"{where}.json_schema", "must be given")
            path = f"{where}.schema" if described is form else f"{where}.json_schema.schema"
            if described.schema_ is None:
                raise invalid(path, "must be given")
            given = _schema(path, described.schema_)
            # OpenAI takes a strict schema only if all its objects are closed.
            closes_objects = bool(described.strict)
            return [replace(given, constraint=replace(given.constraint, closes_objects=closes_objects))]
        case "structural_tag":
            raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served", field=f"{where}.type")
    raise invalid(f"{where}.type", 'must be "text", "json_object" or "json_schema"')


def structured_outputs(options: StructuredOutputs | None) -> list[ConstraintField]:
    """vLLM's object. Raises QuireError."""
    if options is None:
        return []
    where = "structured_outputs"
    given = [
        *_schemas((f"{where}.json", options.json_)),
        *_objects((f"{where}.json_object", options.json_object)),
        *_regexes((f"{where}.regex", options.regex)),
        *_choices((f"{where}.choice", options.choice)),
        *_grammars((f"{where}.grammar", options.grammar)),
    ]
    if not given:
        raise invalid(where, "must have json, json_object, regex, choice or grammar")
    return _with_json_options(
        given,
        (f"{where}.whitespace_pattern", options.whitespace_pattern),
        is_compact=bool(options.disable_any_whitespace),
        is_closed=bool(options.disable_additional_properties),
    )


def _guided(body: ConstraintBody) -> list[ConstraintField]:
    """vLLM's fields before structured_outputs."""
    given = [
        *_schemas(("guided_json", body.guided_json)),
        *_objects(("guided_json_object", body.guided_json_object)),
        *_regexes(("guided_regex", body.guided_regex)),
        *_choices(("guided_choice", body.guided_choice)),
        *_grammars(("guided_grammar", body.guided_grammar)),
    ]
    return _with_json_options(given, ("guided_whitespace_pattern", body.guided_whitespace_pattern))


def _other_servers(body: ConstraintBody) -> list[ConstraintField]:
    """SGLang's regex, ebnf and json_schema; llama.cpp's grammar and json_schema."""
    return [
        *_schemas(("json_schema", body.json_schema)),
        *_regexes(("regex", body.regex)),
        *_grammars(("grammar", body.grammar), ("ebnf", body.ebnf)),
    ]


def _schemas(*given: _Given) -> list[ConstraintField]:
    return [_schema(path, value) for path, value in given if value is not None]


def _objects(*given: _Given) -> list[ConstraintField]:
    return [_named(UnvalidatedConstraint(Field.JSON_OBJECT), path) for path, value in given if value]


def _regexes(*given: _Given) -> list[ConstraintField]:
    return [_named(UnvalidatedConstraint(Field.REGEX, value), path) for path, value in given if value is not None]


def _choices(*given: _Given) -> list[ConstraintField]:
    return [
        _named(UnvalidatedConstraint(Field.CHOICE, choices=tuple(value)), path)
        for path, value in given
        if value is not None
    ]


def _grammars(*given: _Given) -> list[ConstraintField]:
    return [
        _named(UnvalidatedConstraint(Field.GBNF if _GBNF_RULE.search(value) else Field.GRAMMAR, value), path)
        for path, value in given
        if value is not None
    ]


# As in vLLM: a grammar with such a rule is GBNF, any other one Lark.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]{1,200}[ \t]*::=", re.MULTILINE)


def _with_json_options(
    given: list[ConstraintField], pattern: _Given, *, is_compact: bool = False, is_closed: bool = False
) -> list[ConstraintField]:
    """The constraints with options that apply to JSON. `pattern` is that for whitespace."""
    where, whitespace = pattern
    if whitespace is None and not is_compact and not is_closed:
        return given
    # Only structured_outputs has them.
    no_whitespace = "structured_outputs.disable_any_whitespace"
    if whitespace == "":
        raise invalid(where, "must not be empty")
    if whitespace is not None and is_compact:
        raise invalid(where, f"is given beside {no_whitespace}")
    is_schema = any(one.constraint.field is Field.JSON_SCHEMA for one in given)
    if is_closed and not is_schema:
        raise invalid("structured_outputs.disable_additional_properties", "needs a JSON Schema")
    if not is_schema and not any(one.constraint.field is Field.JSON_OBJECT for one in given):
        raise invalid(no_whitespace if is_compact else where, "needs a constraint to JSON")
    changes: dict[str, Any] = {"closes_objects": is_closed}
    if whitespace is not None or is_compact:
        changes["whitespace"] = whitespace or ""
    return [
        replace(
            one,
            constraint=replace(one.constraint, **changes),
            names={**one.names, Field.WHITESPACE_PATTERN: where},
        )
        for one in given
    ]


def _named(constraint: UnvalidatedConstraint, path: str) -> ConstraintField:
    return ConstraintField(constraint, path, {constraint.field: path})


def _schema(where: str, value: Any) -> ConstraintField:
    text = value if isinstance(value, str) else _text(where, value)
    return _named(UnvalidatedConstraint(Field.JSON_SCHEMA, text), where)


def _text(where: str, schema: Any) -> str:
    """A schema as JSON. Stops at the limit: to write the whole of a hostile one takes a while."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(schema):
            pieces.append(piece)
            size += len(piece)
            check_length(where, size)
    except RecursionError:
        raise QuireError(Reason.GRAMMAR_TOO_COMPLEX, "is nested too deeply", field=where) from None
    return "".join(pieces)

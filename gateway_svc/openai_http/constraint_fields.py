"""Constraints on the output in HTTP bodies: fields of OpenAI, vLLM, SGLang and llama.cpp."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.grammar_checker import too_large
from gateway_svc.openai_http import unsupported_fields
from gateway_svc.openai_http.json_fields import JsonFields, as_list, as_string, invalid
from svc_common.errors import QuireError, Reason
from svc_common.grammars import MAX_GRAMMAR_BYTES


@dataclass(frozen=True, slots=True)
class ConstraintField:
    """A constraint and the names that its body has for its fields."""

    constraint: UnvalidatedConstraint
    path: str
    names: Mapping[str, str] = field(default_factory=dict)


def read_constraint(fields: JsonFields) -> ConstraintField | None:
    """The constraint of a body, or None. Raises QuireError where it has two."""
    given = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields), *_other_servers(fields)]
    if len(given) > 1:
        raise invalid(given[1].path, f"is given beside {given[0].path}: a request has one constraint")
    return given[0] if given else None


def _response_format(fields: JsonFields) -> list[ConstraintField]:
    """OpenAI's field. `schema` beside the type is llama.cpp's spelling."""
    form = fields.object("response_format")
    if form is None:
        return []
    match form.string("type"):
        case "text":
            return []
        case "json_object" if not form.has("schema"):
            return [_named(UnvalidatedConstraint(Field.JSON_OBJECT), form.field_path("type"))]
        case "json_object" | "json_schema":
            described = None if form.has("schema") else form.object("json_schema")
            holder = form if described is None else described
            holder.string("name")
            where = (
                holder.field_path("schema")
                if holder is not form or form.has("schema")
                else "response_format.json_schema"
            )
            given = _schema(where, holder.raw("schema"))
            # OpenAI takes a strict schema only if all its objects are closed.
            return [replace(given, constraint=replace(given.constraint, closes_objects=holder.flag("strict")))]
        case "structural_tag":
            raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served", field=form.field_path("type"))
    raise invalid(form.field_path("type"), 'must be "text", "json_object" or "json_schema"')


def _structured_outputs(fields: JsonFields) -> list[ConstraintField]:
    """vLLM's object."""
    options = fields.object("structured_outputs")
    if options is None:
        return []
    options.reject_unsupported(unsupported_fields.STRUCTURED_OUTPUTS)
    given = _kinds(options, {name: name for name in ("json", "json_object", "regex", "choice", "grammar")})
    if not given:
        raise invalid("structured_outputs", "must have json, json_object, regex, choice or grammar")
    return _with_json_options(
        given,
        options,
        pattern="whitespace_pattern",
        compact=options.flag("disable_any_whitespace"),
        closed=options.flag("disable_additional_properties"),
    )


def _guided(fields: JsonFields) -> list[ConstraintField]:
    """vLLM's fields before structured_outputs."""
    kinds = {name: f"guided_{name}" for name in ("json", "json_object", "regex", "choice", "grammar")}
    return _with_json_options(_kinds(fields, kinds), fields, pattern="guided_whitespace_pattern")


def _other_servers(fields: JsonFields) -> list[ConstraintField]:
    """SGLang's regex, ebnf and json_schema; llama.cpp's grammar and json_schema."""
    given = _kinds(fields, {"json": "json_schema", "regex": "regex", "grammar": "grammar"})
    return given + _kinds(fields, {"grammar": "ebnf"})


def _kinds(fields: JsonFields, names: Mapping[str, str]) -> list[ConstraintField]:
    """The constraints in an object, whose kinds have these names there."""
    given = []
    for kind, name in names.items():
        if not fields.has(name):
            continue
        where = fields.field_path(name)
        match kind:
            case "json":
                given.append(_schema(where, fields.raw(name), may_be_text=True))
            case "json_object":
                if fields.flag(name):
                    given.append(_named(UnvalidatedConstraint(Field.JSON_OBJECT), where))
            case "regex":
                given.append(_named(UnvalidatedConstraint(Field.REGEX, as_string(where, fields.raw(name))), where))
            case "choice":
                values = as_list(where, fields.raw(name))
                choices = tuple(as_string(f"{where}[{index}]", value) for index, value in enumerate(values))
                given.append(_named(UnvalidatedConstraint(Field.CHOICE, choices=choices), where))
            case "grammar":
                grammar = as_string(where, fields.raw(name))
                which = Field.GBNF if _GBNF_RULE.search(grammar) else Field.GRAMMAR
                given.append(_named(UnvalidatedConstraint(which, grammar), where))
    return given


# As in vLLM: a grammar with such a rule is GBNF, any other one Lark.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]{1,200}[ \t]*::=", re.MULTILINE)


def _with_json_options(
    given: list[ConstraintField], fields: JsonFields, *, pattern: str, compact: bool = False, closed: bool = False
) -> list[ConstraintField]:
    """The constraints with options that apply to JSON. `pattern` is the name of the pattern for whitespace."""
    whitespace = fields.string(pattern)
    if whitespace is None and not compact and not closed:
        return given
    where = fields.field_path(pattern)
    if whitespace == "":
        raise invalid(where, "must not be empty")
    if whitespace is not None and compact:
        raise invalid(where, f"is given beside {fields.field_path('disable_any_whitespace')}")
    is_schema = any(one.constraint.field is Field.JSON_SCHEMA for one in given)
    if closed and not is_schema:
        raise invalid(fields.field_path("disable_additional_properties"), "needs a JSON Schema")
    if not is_schema and not any(one.constraint.field is Field.JSON_OBJECT for one in given):
        raise invalid(fields.field_path("disable_any_whitespace") if compact else where, "needs a constraint to JSON")
    changes: dict[str, Any] = {"closes_objects": closed}
    if whitespace is not None or compact:
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


def _schema(where: str, value: Any, *, may_be_text: bool = False) -> ConstraintField:
    if value is None:
        raise invalid(where, "must be given")
    if isinstance(value, str) and may_be_text:
        return _named(UnvalidatedConstraint(Field.JSON_SCHEMA, value), where)
    if not isinstance(value, dict | bool):
        raise invalid(where, "must be a JSON Schema: an object, true or false")
    return _named(UnvalidatedConstraint(Field.JSON_SCHEMA, _text(where, value)), where)


def _text(where: str, schema: Any) -> str:
    """A schema as JSON. Stops at the limit: to write the whole of a hostile one takes a while."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(schema):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_GRAMMAR_BYTES:
                raise too_large(where)
    except RecursionError:
        raise QuireError(Reason.GRAMMAR_TOO_COMPLEX, "is nested too deeply", field=where) from None
    return "".join(pieces)

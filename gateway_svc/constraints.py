"""Constraints on the output, as clients write them, and the grammars that workers apply.

A grammar is a text in llguidance's Lark syntax. It is made and compiled in a process of its own, see `grammar_process`:
this module imports neither gRPC nor the rest of the gateway.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from gateway_svc.field_paths import Field
from gateway_svc.json_schemas import UniqueKeys, endless_reference, restrict_dates, schema_parts, unsupported_keyword
from gateway_svc.lark_schemas import replace_schemas
from svc_common.grammars import JSON_ON_ONE_LINE, GrammarTooComplex, InvalidGrammar, compile_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_WHITESPACE = 64
"""Characters that a client's own pattern may allow there."""

_MAX_MESSAGE = 500
_MAX_QUOTED = 200  # characters of each end of llguidance's error
_NOTHING = "no text can match it"
_OPTIONS = "x-guidance"  # llguidance's options in a schema: some of them weaken it


class ConstraintProblem(Enum):
    """Why a constraint is refused."""

    INVALID = "invalid"
    TOO_COMPLEX = "too complex"


class ConstraintError(Exception):
    """A constraint that is refused. The text is for the client. `field` is one beside that of the constraint.

    `schema` is a constraint of which a part may be the cause, see `schema_places`; None: the text has the place.
    """

    def __init__(
        self,
        message: str,
        problem: ConstraintProblem = ConstraintProblem.INVALID,
        field: str | None = None,
        *,
        owner: str = "",
        schema: "UnvalidatedConstraint | None" = None,
    ):
        text = owner + message
        super().__init__(text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…")
        self.message = message
        self.problem = problem
        self.field = field
        self.owner = owner
        self.schema = schema

    def of(self, owner: str, field: str) -> "ConstraintError":
        """The same error, about a constraint that is a part of another. `owner` begins the text."""
        return ConstraintError(self.message, self.problem, field, owner=owner, schema=self.schema)

    def at(self, place: str) -> "ConstraintError":
        """The same error, with its place in a schema."""
        return ConstraintError(f"at {place}: {self.message}", self.problem, self.field, owner=self.owner)


@dataclass(frozen=True, slots=True)
class UnvalidatedConstraint:
    """What the output must match, before validation.

    `text` is a schema as JSON, a regular expression or a grammar, by the `field` that holds it. `whitespace` is a
    regular expression for what may stand where JSON allows whitespace, and empty for none; None: JSON_ON_ONE_LINE.
    With `closes_objects` a schema's objects have no further properties where it lists some.
    """

    field: Field
    text: str = ""
    choices: tuple[str, ...] = ()
    whitespace: str | None = None
    closes_objects: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that a client wrote."""
        return (self.text, *self.choices, self.whitespace or "")


def checked_grammar(constraint: UnvalidatedConstraint, tokenizer: "LLTokenizer") -> str:
    """The grammar of a constraint, compiled for its check. Raises ConstraintError.

    Hostile ones take any time and memory, and may end the process. Call it in a thread of `grammar_threads`.
    """
    if constraint.whitespace:
        _check_whitespace(constraint.whitespace, tokenizer)
    try:
        grammar = _to_lark(constraint)
    except RecursionError:
        raise ConstraintError("is nested too deeply", ConstraintProblem.TOO_COMPLEX) from None
    try:
        return compiled_grammar(grammar, constraint, tokenizer)
    except ConstraintError as error:
        if constraint.field is not Field.JSON_SCHEMA:
            raise
        raise ConstraintError(error.message, error.problem, schema=constraint) from None


def compiled_grammar(grammar: str, constraint: UnvalidatedConstraint, tokenizer: "LLTokenizer") -> str:
    """A grammar that was made of a constraint, compiled for its check. Raises ConstraintError."""
    matcher = _compile(grammar, tokenizer, constraint)
    if warnings := matcher.get_grammar_warnings():
        # A part of it would be ignored.
        raise ConstraintError(_message("; ".join(warnings), constraint))
    if _matches_nothing(matcher):
        raise ConstraintError(_NOTHING)
    return grammar


def _to_lark(constraint: UnvalidatedConstraint) -> str:
    text = constraint.text
    match constraint.field:
        case Field.JSON_SCHEMA:
            return f"start: %json {schema_text(prepared_schema(constraint))}"
        case Field.JSON_OBJECT:
            return f"start: %json {schema_text({'type': 'object', _OPTIONS: json_options(constraint)})}"
        case Field.REGEX:
            return _regex(text)
        case Field.GBNF:
            return _from_gbnf(text)
        case Field.CHOICE:
            # A terminal, so that the lexer alone decides.
            return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, constraint.choices))}"
    if text.lstrip().startswith("{"):
        # llguidance takes its own JSON format for grammars too.
        raise ConstraintError("is not a grammar in Lark's syntax")
    return replace_schemas(text, _prepared_within)


def _prepared_within(schema: str) -> str:
    """A schema within a grammar, with the rules of one that is a constraint by itself."""
    try:
        return schema_text(prepared_schema(UnvalidatedConstraint(Field.JSON_SCHEMA, schema)))
    except ConstraintError as error:
        raise ConstraintError(f"the schema after %json {error.message}") from None


def prepared_schema(constraint: UnvalidatedConstraint) -> dict[str, Any]:
    """A schema with llguidance's options. Raises ConstraintError."""
    unique = UniqueKeys()
    try:
        schema = json.loads(constraint.text, object_pairs_hook=unique, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise ConstraintError(f"is not JSON: {error}") from None
    except ValueError:
        raise ConstraintError("holds an integer with too many digits") from None
    if place := unique.repeated_in(schema):
        raise ConstraintError(f"at {place}: the key is twice in its object")
    if schema is True:
        schema = {}
    if schema is False:
        raise ConstraintError(_NOTHING)
    if not isinstance(schema, dict):
        raise ConstraintError("is not a JSON Schema: it must be an object, true or false")
    if _OPTIONS in schema:
        raise ConstraintError(f"the keyword {_OPTIONS} is not supported")
    if problem := unsupported_keyword(schema):
        raise ConstraintError(problem)
    if place := endless_reference(schema):
        raise ConstraintError(f"at {place}: the reference leads to nothing but itself")
    for _, part in schema_parts(schema):
        if constraint.closes_objects and ("properties" in part or "patternProperties" in part):
            part.setdefault("additionalProperties", False)
    restrict_dates(schema)
    return {**schema, _OPTIONS: json_options(constraint)}


def json_options(constraint: UnvalidatedConstraint) -> Mapping[str, Any]:
    """llguidance's options for the JSON of a constraint."""
    if constraint.whitespace is None:
        return JSON_ON_ONE_LINE
    return {"whitespace_pattern": constraint.whitespace} if constraint.whitespace else {"whitespace_flexible": False}


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    if not regex:
        raise ConstraintError("must not be empty")
    # As in the patterns of a JSON Schema: \d and \w are ASCII.
    return f"start: /{regex_to_lark(regex, 'dw')}/"


def _from_gbnf(text: str) -> str:
    from gateway_svc.gbnf import InvalidGbnf, gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except InvalidGbnf as error:
        raise ConstraintError(f"is not a grammar in GBNF: {error}") from None


def _check_whitespace(pattern: str, tokenizer: "LLTokenizer") -> None:
    """Rejects a pattern that matches anything but a bounded number of the characters that JSON allows."""
    constraint = UnvalidatedConstraint(Field.WHITESPACE_PATTERN, pattern)
    body = _regex(pattern).removeprefix("start: ")
    try:
        matcher = _compile(
            f"start: OTHER\nOTHER: {body} & ~/[ \\t\\r\\n]{{0,{MAX_WHITESPACE}}}/", tokenizer, constraint
        )
        is_bounded = _matches_nothing(matcher)
    except ConstraintError as error:
        raise ConstraintError(str(error), error.problem, Field.WHITESPACE_PATTERN) from None
    if not is_bounded:
        message = f"must match only spaces, tabs and line breaks, at most {MAX_WHITESPACE} of them"
        raise ConstraintError(message, field=Field.WHITESPACE_PATTERN)


def _compile(grammar: str, tokenizer: "LLTokenizer", constraint: UnvalidatedConstraint) -> "LLMatcher":
    try:
        return compile_grammar(tokenizer, grammar)
    except GrammarTooComplex as error:
        raise ConstraintError(_message(str(error), constraint), ConstraintProblem.TOO_COMPLEX) from None
    except InvalidGrammar as error:
        raise ConstraintError(_message(str(error), constraint)) from None


def _matches_nothing(matcher: "LLMatcher") -> bool:
    """Whether no text matches. Raises ConstraintError where a limit is exceeded by the mask of the first token, or of
    the first one that is not forced.
    """
    is_accepting = matcher.is_accepting()
    matcher.compute_bitmask()
    if not matcher.is_error() and (forced := matcher.compute_ff_tokens()):
        # Where a forced text has the literal of an added token, llguidance returns that token, which does not follow.
        matcher.consume_tokens(forced[: matcher.validate_tokens(forced)])
        matcher.compute_bitmask()
    if not matcher.is_error():
        return False
    if matcher.get_error().startswith("NoExtension"):
        return not is_accepting
    raise ConstraintError("its first token exceeds a limit", ConstraintProblem.TOO_COMPLEX)


_PLACE = re.compile(r"^at \d+\(\d+\): ")
# llguidance ends the error of a regular expression with its cause.
_REGEX_ERROR = re.compile(
    r"regex parse error:\n {4}(?P<regex>[^\n]*)\n {4}(?P<mark> *)\^+\nerror: (?P<cause>.*)", re.DOTALL
)
_UNSUPPORTED = re.compile(r"Unimplemented keys: (?P<keys>\[.*?\])")
_FORMAT = re.compile(r"Unknown format: (?P<name>.*)")


def _message(error: str, constraint: UnvalidatedConstraint) -> str:
    """llguidance's error as clients see it: with its place in what the client wrote, and without the text itself."""
    text = _PLACE.sub("", error)
    # Of other constraints the place is one in the grammar that Quire wrote.
    place = error[: len(error) - len(text)] if constraint.field is Field.GRAMMAR else ""
    text = text.removeprefix("failed to compile JSON schema: ")
    if found := _REGEX_ERROR.search(text):
        return f"{place}invalid regular expression: {found['cause']} (at character {len(found['mark']) + 1})"
    if found := _UNSUPPORTED.search(text):
        keys = json.loads(found["keys"])
        return f"the keyword {keys[0]} is not supported"
    if found := _FORMAT.search(text):
        return f"the format {found['name']} is not supported"
    if text.startswith("oneOf constraints"):
        return "oneOf is supported only if its schemas exclude each other, such as by a property with different const"
    text = place + " ".join(text.split())
    # The cause comes last.
    return text if len(text) <= 2 * _MAX_QUOTED else f"{text[:_MAX_QUOTED]} … {text[-_MAX_QUOTED:]}"


def schema_text(schema: Any) -> str:
    """The JSON of a schema. Raises ConstraintError."""
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ConstraintError("holds a number that is too large") from None


def _not_finite(name: str) -> Any:
    raise ConstraintError(f"is not JSON: it holds {name}")

"""The place in a JSON Schema for which it is refused: the smallest part that is refused alone, for the same reason."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gateway_svc.constraints import (
    ConstraintError,
    ConstraintProblem,
    UnvalidatedConstraint,
    compiled_grammar,
    prepared_schema,
    schema_text,
)
from gateway_svc.field_paths import Field
from gateway_svc.json_schemas import WITH_NAMES, child_pointer, schema_parts

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SECONDS = 0.2
"""Processor time until the search ends without a place. A part takes about 0.1 ms."""
_MAX_POINTER = 200
_DEFINITIONS = ("$defs", "definitions")


def with_place(error: ConstraintError, tokenizer: "LLTokenizer") -> ConstraintError:
    """The error of a schema with its place, a JSON pointer, or the same one if none is found. Call it in a thread of
    `grammar_threads`."""
    if error.schema is None:
        return error
    search = _Search(error, error.schema, tokenizer)
    try:
        pointer = search.pointer()
    except TimeoutError:
        return error
    if len(pointer) > _MAX_POINTER:
        pointer = f"{pointer[: _MAX_POINTER // 2]}…{pointer[-_MAX_POINTER // 2 :]}"
    return error.at(pointer)


class _Search:
    def __init__(self, error: ConstraintError, constraint: UnvalidatedConstraint, tokenizer: "LLTokenizer") -> None:
        self._error = error
        self._tokenizer = tokenizer
        self._schema = prepared_schema(constraint)
        self._options = {key: value for key, value in self._schema.items() if key == "x-guidance"}
        self._definitions = {key: self._schema[key] for key in _DEFINITIONS if key in self._schema}
        self._end = time.thread_time() + _SECONDS

    def pointer(self) -> str:
        """Raises TimeoutError."""
        parts = [(pointer, part) for pointer, part in schema_parts(self._schema) if not pointer.startswith("#/x-guid")]
        references = {part["$ref"] for _, part in parts if isinstance(part.get("$ref"), str)}
        pointers = {pointer for pointer, _ in parts}
        at_reference = None
        # A part comes before those that it is within.
        for pointer, part in reversed(parts[1:]):
            if _is_unused(pointer, references) or not self._is_refused(part):
                continue
            if part.get("$ref") not in pointers:
                return self._within(pointer, part)
            # What it refers to is more likely the cause, and may come later.
            at_reference = at_reference or pointer
        return at_reference or self._within("#", self._schema)

    def _within(self, pointer: str, part: dict[str, Any]) -> str:
        """The place in a part: a keyword of it, or a name in one, which is refused alone."""
        for one, smaller in _keywords(pointer, part):
            if self._is_refused(smaller):
                return one
        return pointer

    def _is_refused(self, part: dict[str, Any]) -> bool:
        """Whether a part alone is refused for the same reason as the schema."""
        if time.thread_time() > self._end:
            raise TimeoutError
        text = schema_text(part)
        definitions = self._definitions if '"$ref"' in text else {}
        try:
            grammar = f"start: %json {schema_text({**definitions, **part, **self._options})}"
            compiled_grammar(grammar, UnvalidatedConstraint(Field.JSON_SCHEMA, text), self._tokenizer)
        except ConstraintError as error:
            is_too_complex = error.problem is ConstraintProblem.TOO_COMPLEX
            return error.problem is self._error.problem and (is_too_complex or error.message == self._error.message)
        return False


def _keywords(pointer: str, part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for keyword, value in part.items():
        if keyword in _DEFINITIONS or keyword == "x-guidance":
            continue
        where = child_pointer(pointer, keyword)
        if keyword in WITH_NAMES and isinstance(value, dict):
            yield from ((child_pointer(where, name), {keyword: {name: item}}) for name, item in value.items())
        yield where, {keyword: value}


def _is_unused(pointer: str, references: set[Any]) -> bool:
    """Whether a part is in a definition to which no reference leads."""
    _, first, *rest = f"{pointer}/".split("/")
    return first in _DEFINITIONS and not any(one.startswith(f"#/{first}/{rest[0]}") for one in references)

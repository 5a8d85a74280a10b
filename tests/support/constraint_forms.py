"""Constraints on the output, as clients write them over HTTP, and what matches the grammars that they become."""

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from svc_common.grammars import compile_grammar

LARK = 'start: "yes" | "no"'


def matches(grammar: str, text: str, vocabulary: LLTokenizer) -> bool:
    """Whether a grammar takes a whole text."""
    matcher: LLMatcher = compile_grammar(vocabulary, grammar)
    token_ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def form(kind: str, **fields: Any) -> dict[str, Any]:
    """A response_format."""
    return {"response_format": {"type": kind, **fields}}


def schema_form(schema: Any, **fields: Any) -> dict[str, Any]:
    """A response_format with a schema."""
    return form("json_schema", json_schema={"name": "x", "schema": schema, **fields})


def structured(**fields: Any) -> dict[str, Any]:
    """A structured_outputs."""
    return {"structured_outputs": fields}

"""JSON schemas within grammars in Lark's syntax."""

import json
import re
from collections.abc import Callable

# In strings, comments and regular expressions %json is text.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/|(?P<json>%json\b\s*)', re.DOTALL)
_DECODER = json.JSONDecoder()


def replace_schemas(grammar: str, replace: Callable[[str], str]) -> str:
    """The grammar with another schema for each one, on as many lines. What is no JSON stays: the compiler names it."""
    parts: list[str] = []
    copied = place = 0
    while (token := _TOKEN.search(grammar, place)) is not None:
        place = token.end()
        if token["json"] is None:
            continue
        try:
            _, end = _DECODER.raw_decode(grammar, place)
        except ValueError:
            continue
        schema = grammar[place:end]
        parts += (grammar[copied:place], replace(schema), "\n" * schema.count("\n"))
        copied = place = end
    return "".join((*parts, grammar[copied:]))

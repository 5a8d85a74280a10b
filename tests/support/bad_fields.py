"""Bodies with one bad field, and the answer to each."""

import json
from collections.abc import Mapping
from typing import Any

from gateway_harness import Harness

# Path, the rest of the body, and the bad field; then code and field of the error.
Case = tuple[str, dict[str, Any], str, str]
INVALID, UNSUPPORTED, TOO_LONG, UNKNOWN, NO_GRAMMAR, TOO_COMPLEX = (
    "invalid_field",
    "feature_unsupported",
    "context_length_exceeded",
    "model_not_found",
    "grammar_invalid",
    "grammar_too_complex",
)
STATUSES = {INVALID: 400, UNSUPPORTED: 400, TOO_LONG: 400, UNKNOWN: 404, NO_GRAMMAR: 400, TOO_COMPLEX: 400}

# Values of another type than a field has. JSON has no other kinds.
NOT_A: dict[str, list[Any]] = {
    "number": ["1", True, [], {}],
    "integer": ["1", False, 1.0, [1], {}],
    "flag": ["true", 0, 1, [], {}],
    "string": [1, True, [], {}],
    "object": ["{}", 1, True, []],
    "integers": ["1", 1, {}, True],
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {}}}


def name_of(case: Case) -> str:
    """Of a test of the case."""
    path, body, _, _ = case
    return f"{path.partition('/')[0]} {ascii(body)[:60]}"


async def check_refused(case: Case, valid: Mapping[str, dict[str, Any]], gateway: Harness) -> None:
    """Sends a body, with the fields that its path has in `valid`: status, code and the field's name are the case's."""
    path, body, code, field = case
    content = json.dumps(valid[path] | body)
    answer = await gateway.http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (STATUSES[code], code, field)
    assert len(answer.content) < 1_000

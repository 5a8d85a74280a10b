"""Bodies of embeddings, batches and responses with one bad field: as test_http_fields.py."""

from collections.abc import Iterator
from typing import Any

import pytest

from bad_fields import (
    INVALID,
    NOT_A,
    TOO_LONG,
    TOOL,
    UNKNOWN,
    UNSUPPORTED,
    Case,
    check_refused,
    name_of,
)
from gateway_harness import Harness
from tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.asyncio(loop_scope="module")

INPUTS: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "hello"},
    "responses": {"input": "hello"},
    "chat/completions/batch": {"messages": [[{"role": "user", "content": "hello"}]]},
}


def embeddings() -> Iterator[Case]:
    """Bodies of /v1/embeddings."""
    far, half, many = 10**6, "\ud800", CONTEXT_LENGTH + 1
    kinds: dict[str, list[str]] = {
        "integer": ["dimensions", "truncate_prompt_tokens", "priority"],
        "flag": ["normalize", "use_activation", "add_special_tokens"],
        "string": ["model"],
    }
    for kind, names in kinds.items():
        for name in names:
            for value in NOT_A[kind]:
                yield "embeddings", {name: value}, INVALID, name
    no_inputs: list[Any] = [1, True, {}, "", [], None, ["a"] * 2_049, half]
    no_retentions: list[Any] = ["always", 0, -1, True, [], {}, 1.5]
    no_names: list[Any] = ["none", "", 1, [], {}]
    rows: list[tuple[dict[str, Any], str, str]] = [
        *(({"input": value}, INVALID, "input") for value in no_inputs),
        ({"input": [""]}, INVALID, "input[0]"), ({"input": ["a", []]}, INVALID, "input[1]"),
        ({"input": ["a", 1]}, INVALID, "input[1]"), ({"input": [5, "a"]}, INVALID, "input[1]"),
        ({"input": ["a", half]}, INVALID, "input[1]"), ({"input": [[5], [far]]}, INVALID, "input[1][0]"),
        ({"input": [[5, -1]]}, INVALID, "input[0][1]"), ({"input": [5, far]}, INVALID, "input[1]"),
        ({"input": "a" * many}, TOO_LONG, "input"), ({"input": ["a", "a" * many]}, TOO_LONG, "input[1]"),
        ({"input": [5] * many}, TOO_LONG, "input"), ({"input": [[5], [5] * many]}, TOO_LONG, "input[1]"),
        ({"input": "a" * 10**6}, TOO_LONG, "input"),
        ({"input": [5] * many * 16, "truncate_prompt_tokens": -1}, TOO_LONG, "input"),
        *(({"dimensions": value}, INVALID, "dimensions") for value in (0, -1, 65_537, 10**30)),
        *(({"truncate_prompt_tokens": value}, INVALID, "truncate_prompt_tokens") for value in (0, -2, many, 2**63)),
        *(({"priority": value}, INVALID, "priority") for value in (2**31, -(2**31) - 1)),
        *(({"retention": value}, INVALID, "retention") for value in no_retentions),
        *(({name: value}, INVALID, name) for name in ("encoding_format", "pooling", "truncation_side")
          for value in no_names),
        ({"normalize": True, "use_activation": False}, INVALID, "use_activation"),
        ({"model": "other"}, UNKNOWN, "model"), ({"model": half}, UNKNOWN, "model"),
        ({"dimension": 5}, INVALID, "dimension"), ({"encoding_fromat": "float"}, INVALID, "encoding_fromat"),
        *(({name: value}, UNSUPPORTED, name) for name, value in {
            "embed_dtype": "float16", "endianness": "big", "padding": "max_length", "input_type": "query",
            "temperature": 1, "stream": True, "request_id": "a",
        }.items()),
        ({"messages": [{"role": "user", "content": "a"}]}, INVALID, "messages"),
        *(({"input": None, "messages": messages}, INVALID, field) for messages, field in [
            ([], "messages"), ([{"role": "root", "content": "a"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
        ]),
    ]  # fmt: skip
    for fields, code, where in rows:
        yield "embeddings", fields, code, where


def batches() -> Iterator[Case]:
    """Bodies of /v1/chat/completions/batch."""
    user = {"role": "user", "content": "a"}
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": None}, INVALID, "messages"), ({"messages": []}, INVALID, "messages"),
        ({"messages": 1}, INVALID, "messages"), ({"messages": [[user]] * 1_025}, INVALID, "messages"),
        ({"messages": [user]}, INVALID, "messages[0]"), ({"messages": [[user], []]}, INVALID, "messages[1]"),
        ({"messages": [[user], None]}, INVALID, "messages[1]"),
        ({"messages": [[user], [1]]}, INVALID, "messages[1][0]"),
        ({"messages": [[user], [user, {"role": "a", "content": "a"}]]}, INVALID, "messages[1][1].role"),
        ({"messages": [[user], [{"role": "user", "content": 1}]]}, INVALID, "messages[1][0].content"),
        ({"messages": [[user], [{"role": "user", "content": "a" * (CONTEXT_LENGTH + 1)}]]}, TOO_LONG, "messages[1]"),
        *(({name: value}, UNSUPPORTED, name) for name, value in {
            "stream": True, "stream_options": {}, "echo": True, "prompt_logprobs": 1, "tools": [TOOL],
            "tool_choice": "required", "functions": [TOOL["function"]], "function_call": "auto",
        }.items()),
        ({"temperature": 3}, INVALID, "temperature"), ({"top_logprobs": 2}, INVALID, "top_logprobs"),
    ]  # fmt: skip
    for fields, code, where in rows:
        yield "chat/completions/batch", fields, code, where


def responses() -> Iterator[Case]:
    """Tools of /v1/responses."""
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, INVALID, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, INVALID, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "defer_loading": True}]}, UNSUPPORTED, "tools[0].defer_loading"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "a"}}]}, INVALID, "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}]}, INVALID,
         "tools[0].format.definition"),
        ({"tool_choice": {"type": "mcp"}}, UNSUPPORTED, "tool_choice.type"),
        ({"tool_choice": {"type": "custom", "name": "a"}}, INVALID, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, INVALID, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, INVALID, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "name": "a"}]}},
         UNSUPPORTED, "tool_choice.tools[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "a"}]}, INVALID, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "a", "output": "a"}]}, INVALID, "input[0].call_id"),
    ]  # fmt: skip
    for fields, code, where in rows:
        yield "responses", fields, code, where


CASES = [*embeddings(), *batches(), *responses()]


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_a_bad_field_is_named(case: Case, gateway: Harness) -> None:
    await check_refused(case, INPUTS, gateway)

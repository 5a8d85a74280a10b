"""The same errors of chats in each protocol: they name the field as the caller has written it."""

import json
from typing import Any

import grpc
import pytest

from gateway_harness import Harness, reason_of
from quire.inference.v1 import inference_pb2 as api

HALF = "\ud800"  # half a surrogate pair, which no text has
CHATS, MESSAGES, OLLAMA, OLLAMA_TEXT, RESPONSES = (
    "/v1/chat/completions",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/v1/responses",
)
USER = {"role": "user", "content": "a"}


def deep() -> Any:
    """A schema of too many levels."""
    value: Any = {}
    for _ in range(120):
        value = {"properties": value}
    return value


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 5, "messages": [USER, *messages], **more}


def calling(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


def custom(definition: str) -> dict[str, Any]:
    return {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}}


GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": HALF}
TOOL_USE: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "reasoning": (CHATS, chat({"role": "assistant", "reasoning": HALF}), "messages[1].reasoning"),
    "reasoning_content": (
        CHATS,
        chat({"role": "assistant", "reasoning_content": HALF}),
        "messages[1].reasoning_content",
    ),
    "a call's id": (
        CHATS,
        chat(calling({"id": HALF, "function": {"name": "f", "arguments": "{}"}})),
        "messages[1].tool_calls[0].id",
    ),
    "a call's function": (
        CHATS,
        chat(calling({"id": "a", "function": {"name": "f", "arguments": "[]"}})),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "a custom call": (
        CHATS,
        chat(calling({"id": "a", "type": "custom", "custom": {"name": "f", "input": HALF}})),
        "messages[1].tool_calls[0].custom.input",
    ),
    "a custom tool": (
        CHATS,
        chat(tools=[{"type": "custom", "custom": custom(HALF)}]),
        "tools[0].custom.format.grammar.definition",
    ),
    "Anthropic's system": (MESSAGES, chat(system=HALF), "system"),
    "Anthropic's schema": (MESSAGES, chat(tools=[{"name": "f", "input_schema": deep()}]), "tools[0].input_schema"),
    "Anthropic's call": (
        MESSAGES,
        chat({"role": "assistant", "content": [TOOL_USE | {"id": HALF}]}),
        "messages[1].content[0].id",
    ),
    "Anthropic's result": (
        MESSAGES,
        chat(
            {"role": "assistant", "content": [TOOL_USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": HALF, "content": "a"}]},
        ),
        "messages[2].content[0].tool_use_id",
    ),
    "Ollama's prompt": (OLLAMA_TEXT, {"model": "tiny", "prompt": HALF}, "prompt"),
    "Ollama's system": (OLLAMA_TEXT, {"model": "tiny", "prompt": "a", "system": HALF}, "system"),
    "Ollama's thinking": (
        OLLAMA,
        {"model": "tiny", "messages": [USER, {"role": "assistant", "thinking": HALF}]},
        "messages[1].thinking",
    ),
    "Ollama's call": (
        OLLAMA,
        {"model": "tiny", "messages": [USER, calling({"function": {"name": HALF, "arguments": {}}})]},
        "messages[1].tool_calls[0].function.name",
    ),
    "instructions": (RESPONSES, {"input": "a", "instructions": HALF}, "instructions"),
    "an input": (RESPONSES, {"input": HALF}, "input"),
    "an item's call": (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "a" * 300, "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
    ),
    "an item's tool": (
        RESPONSES,
        {"input": "a", "tools": [{"type": "custom", "name": "f", "format": GRAMMAR}]},
        "tools[0].format.definition",
    ),
}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_an_error_that_repeats_half_a_surrogate_pair_is_sent(path: str, quire: Harness) -> None:
    body = json.dumps({"input": "a", "previous_response_id": HALF})
    response = await quire.http.post(path, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "request_unknown", "previous_response_id")
    assert error["message"] == r"previous_response_id: Response with id '\ud800' not found."


@pytest.mark.parametrize("case", CASES)
async def test_a_field_of_a_chat_is_named_over_http(case: str, quire: Harness) -> None:
    path, body, field = CASES[case]
    headers = {"content-type": "application/json"}
    response = await quire.http.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    named = error if isinstance(error, str) else (error.get("param") or error["message"])
    assert named == field or named.startswith(f"{field}: "), response.text


async def test_a_field_of_a_chat_is_named_over_grpc(quire: Harness) -> None:
    request = api.GenerateRequest()
    request.generation.chat.messages.add(role="user", content="a")
    message = request.generation.chat.messages.add(role="assistant")
    message.tool_calls.add(name="f", arguments="[]", id="a")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await quire.stub.Generate(request)
    assert reason_of(failed.value)[1] == "generation.chat.messages[1].tool_calls[0].arguments"

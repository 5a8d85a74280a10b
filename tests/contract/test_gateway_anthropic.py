"""Anthropic's API over the wire, with a scripted scheduler and a model with reasoning and tools."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from answers_with_calls import ANSWERS, ARGUMENTS, make_family_directory
from gateway_harness import Harness, running_gateway
from scripted_scheduler import answer_with
from tool_families import tool

EOS = 0
CONTEXT_LENGTH = 2_000
WEATHER = tool("get_weather", city={"type": "string"})["function"]
TOOLS = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}]
ANSWER = ANSWERS["reasoning, text and call"]
HEADERS = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_directory(tmp_path_factory.mktemp("models") / "hermes", "hermes")


@pytest.fixture
async def quire(hermes: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\n')
    async with running_gateway(hermes, CONTEXT_LENGTH, api_keys=keys) as harness:
        harness.http.headers.update({**HEADERS, "x-api-key": "the-own-key-of-alice"})
        yield harness


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, "max_tokens": 200, **fields}


async def test_what_is_not_served_has_an_error_in_the_format_of_the_protocol(quire: Harness) -> None:
    response = await quire.http.get("/v1/messages/batches")
    error = {"type": "not_found_error", "message": "there is nothing at this address"}
    assert (response.status_code, response.json()) == (404, {"type": "error", "error": error})


async def test_messages_whole_and_streamed(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWER.token_ids, stop_token_id=EOS, cached_tokens=3)
    response = await quire.http.post("/v1/messages", json=body())
    answer = response.json()
    assert answer["id"] == f"msg_{response.headers['x-request-id']}" == f"msg_{response.headers['request-id']}"
    thinking, text, call = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", ANSWER.reasoning)
    assert text == {"type": "text", "text": ANSWER.text}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", json.loads(ARGUMENTS))
    assert (answer["stop_reason"], answer["usage"]["cache_read_input_tokens"]) == ("tool_use", 3)

    counted = (await quire.http.post("/v1/messages/count_tokens", json=body())).json()
    assert counted == {"input_tokens": answer["usage"]["input_tokens"] + 3}

    streamed = await quire.http.post("/v1/messages", json=body(stream=True))
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    data = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data")]
    assert (data[0]["type"], data[-1]["type"]) == ("message_start", "message_stop")
    deltas = [event["delta"] for event in data if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER.text
    assert "".join(delta.get("thinking", "") for delta in deltas) == ANSWER.reasoning
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == json.loads(ARGUMENTS)
    assert data[-2]["usage"] == answer["usage"]


async def test_errors_have_the_protocols_form(quire: Harness) -> None:
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    for headers, changes, status, kind, message in (
        ({}, {"temperature": 3}, 400, "invalid_request_error", "temperature: must be between 0 and 2"),
        ({}, {"messages": [image]}, 400, "invalid_request_error", "messages[0].content[0].type: only text"),
        ({}, {"model": "claude"}, 404, "not_found_error", "model: no such model"),
        ({}, {"tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice: names none"),
        ({"x-api-key": "wrong"}, {}, 401, "authentication_error", ""),
        ({"anthropic-version": "2023-01-01"}, {}, 400, "invalid_request_error", "anthropic-version: must be"),
    ):
        response = await quire.http.post("/v1/messages", json=body(**changes), headers=headers)
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert error["error"]["message"].startswith(message)
        assert response.headers["request-id"]
    for field, value in (("max_tokens", None), ("messages", [])):
        error = (await quire.http.post("/v1/messages", json=body(**{field: value}))).json()
        assert error["error"]["message"].startswith(f"{field}: must")


async def test_the_refusal_of_a_thread_has_the_code_that_tool_runners_read(quire: Harness) -> None:
    response = await quire.http.post("/v1/messages", json=body(thread={"type": "create"}))
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    error = {"type": "invalid_request_error", "message": "thread: is not served", "details": details}
    assert (response.status_code, response.json()) == (400, {"type": "error", "error": error})


async def test_a_turn_with_the_result_of_a_call(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWERS["text"].token_ids, stop_token_id=EOS)
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "4 degrees"}
    messages = [*body()["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = (await quire.http.post("/v1/messages", json=body(messages=messages))).json()
    assert answer["content"] == [{"type": "text", "text": ANSWERS["text"].text}]
    assert answer["stop_reason"] == "end_turn"

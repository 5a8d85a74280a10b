"""Tools with the shallow model, whose template has no place for them: calls that must be made are valid."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deployment import Deployment, deployment
from quire_client import AllowedTools, Client, CustomTool, FinishReason, Message, Tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA, "strict": True},
}
USER: Any = {"role": "user", "content": "What is the weather in Paris in the next two days?"}
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def running(shallow_model: object) -> Iterator[Deployment]:
    with deployment(gateways=2, tool_format="hermes") as started:
        yield started


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_must_be_made_is_valid_and_its_result_is_read(choice: Any, running: Deployment) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[USER],
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            seed=1,
        )
        message = answer.choices[0].message
        assert message.tool_calls
        for call in message.tool_calls:
            assert call.type == "function"
            assert call.function.name == "get_weather"
            check_arguments(call.function.arguments)
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 20 degrees."}
        messages: Any = [USER, message.model_dump(exclude_none=True), result]
        final = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=30, temperature=0
        )
    assert final.choices[0].message.content


async def test_streamed_calls_are_the_whole_ones(running: Deployment) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": MODEL, "messages": [USER], "tools": [TOOL], "max_tokens": 200, "seed": 7}
        options |= {"tool_choice": "required", "parallel_tool_calls": False}
        whole = await client.chat.completions.create(**options)
        async with client.chat.completions.stream(**options) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    functions = [
        [(call.function.name, call.function.arguments) for call in one.choices[0].message.tool_calls or ()]
        for one in (whole, streamed)
    ]
    assert functions[0]
    assert functions[0] == functions[1]


def test_a_stream_is_resumed_within_the_arguments(running: Deployment) -> None:
    first, second = (str(address) for address in running.state["grpc"][:2])
    tool = Tool("get_weather", "Weather of a city.", SCHEMA, strict=True)
    with Client(first) as client, Client(second) as other:
        question = [Message("user", USER["content"])]
        whole = client.chat(question, tools=[tool], tool_choice="get_weather", request_id="forecast", max_tokens=200)
        (call,) = whole.tool_calls
        check_arguments(call.arguments)
        assert whole.finish_reason is FinishReason.TOOL_CALLS
        for position in range(0, len(whole.token_ids) + 1, 5):
            pieces = [piece for chunk in other.resume("forecast", {0: position}) for piece in chunk.tool_calls]
            rest = "".join(piece.arguments for piece in pieces)
            assert call.arguments.endswith(rest)
            # The first piece of a call has its id.
            assert [piece.id for piece in pieces if piece.id] == ([call.id] if rest == call.arguments else [])
        resumed = other.resume("forecast").collect()
    assert (resumed.tool_calls, resumed.text) == (whole.tool_calls, whole.text)


SUM = r"[1-9] \+ [1-9] = [0-9]{1,2}"


async def test_the_text_of_a_custom_tool_matches_its_grammar_over_both_protocols(running: Deployment) -> None:
    question = "Compute two plus three."
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": SUM}}
    custom: Any = {"type": "custom", "custom": {"name": "compute", "description": "Computes.", "format": grammar}}
    names = [{"type": "custom", "custom": {"name": "compute"}}]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    async with openai.AsyncOpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            tools=[TOOL, custom],
            tool_choice=allowed,
            parallel_tool_calls=False,
            max_tokens=200,
            seed=3,
        )
    calls: Any = answer.choices[0].message.tool_calls
    (over_http,) = calls
    assert over_http.type == "custom"
    assert (over_http.custom.name, answer.choices[0].finish_reason) == ("compute", "tool_calls")
    assert re.fullmatch(SUM, over_http.custom.input)

    tools: list[CustomTool | Tool] = [
        Tool("get_weather", "Weather of a city.", SCHEMA, strict=True),
        CustomTool("compute", "Computes.", regex=SUM),
    ]
    choice = AllowedTools(["compute"], "required")
    with Client(running.grpc) as own:
        stream = own.stream_chat(
            [Message("user", question)],
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            seed=3,
        )
        chunks = list(stream)
        assert stream.acceptance is not None
        whole = own.resume(stream.acceptance.request_id).collect()
        pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
        assert "".join(piece.input or "" for piece in pieces) == over_http.custom.input
        (call,) = whole.tool_calls
        assert (call.name, call.input, call.arguments) == ("compute", over_http.custom.input, "")
        assert whole.finish_reason is FinishReason.TOOL_CALLS
        # Its result is read.
        messages = [
            Message("user", question),
            Message("assistant", "", [call]),
            Message("tool", "5", tool_call_id=call.id),
        ]
        assert own.chat(messages, tools=tools, tool_choice="none", max_tokens=30, temperature=0).text

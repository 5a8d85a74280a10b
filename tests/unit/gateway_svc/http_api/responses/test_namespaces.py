"""Functions in namespaces: one name for the model, two for clients."""

from typing import Any

import pytest
from openai.types.responses import Response

from gateway_svc.chats import ChatPrompt, ToolChoice, ToolMode
from gateway_svc.http_api.responses.conversation import chat_messages, input_items
from gateway_svc.http_api.responses.events import ResponseEvents
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.responses.request import ResponseName, ResponseRequest
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.output import Chunk, Finish, FinishReason, ToolCallDelta, Usage
from gateway_values import vocabulary_of
from svc_common.errors import QuireError, Reason
from tiny_model import tiny_tokenizer

FORECAST = {"type": "function", "name": "forecast", "description": "For a day.", "parameters": {"type": "object"}}
WEATHER = {"type": "namespace", "name": "weather", "description": "Weather of a city.", "tools": [FORECAST]}
STOCKS = {"type": "namespace", "name": "stocks", "tools": [{**FORECAST, "description": None}]}
HEAD = {
    "id": "resp_1", "object": "response", "created_at": 1, "background": False, "model": "m", "tool_choice": "auto",
    "parallel_tool_calls": True,
}  # fmt: skip


def prompt(**fields: Any) -> ChatPrompt:
    request = ResponseRequest.of(ResponsesBody.of({"input": "Hi", **fields}), ResponseName("resp_1"), [])
    made = request.prompt(request.messages).unvalidated.prompt
    assert isinstance(made, ChatPrompt)
    return made


def test_the_model_has_one_name_for_each_function() -> None:
    tools = prompt(tools=[FORECAST, WEATHER, STOCKS]).tools
    assert [(tool.name, tool.description) for tool in tools] == [
        ("forecast", "For a day."),
        ("weather__forecast", "Weather of a city.\nFor a day."),
        ("stocks__forecast", None),
    ]
    assert [tool.path for tool in tools] == ["tools[0]", "tools[1].tools[0]", "tools[2].tools[0]"]


def test_a_function_is_chosen_by_both_names() -> None:
    choice = {"type": "function", "name": "forecast"}
    assert prompt(tools=[WEATHER], tool_choice={**choice, "namespace": "weather"}).tool_choice == ToolChoice(
        ToolMode.NAMED, "weather__forecast"
    )
    assert prompt(tools=[FORECAST], tool_choice=choice).tool_choice == ToolChoice(ToolMode.NAMED, "forecast")


@pytest.mark.parametrize("name", ["weather__forecast", "forecast", "unknown__forecast"])
def test_clients_get_both_names_of_a_call(name: str) -> None:
    tools = [ResponsesBody.of({"input": "", "tools": [one]}).tools for one in (FORECAST, WEATHER)]
    head = {**HEAD, "tools": [tool.model_dump() for (tool,) in filter(None, tools)]}
    events = ResponseEvents(StoredResponse(head), vocabulary_of(tiny_tokenizer()))
    call = ToolCallDelta(0, "{}", "call_1", name)
    made = events.add(Chunk(0, 0, tool_calls=[call], finish=Finish(FinishReason.STOP)), Usage(1, 1, 0, 0))
    expected = {"name": name}
    if name.startswith("weather"):
        expected = {"name": "forecast", "namespace": "weather"}
    items = [event["item"] for event in made if "item" in event]
    assert len(items) == 2
    for item in items:
        assert {field: item[field] for field in ("name", "namespace") if field in item} == expected
    Response.model_validate(events.response)


def test_calls_in_the_input_have_the_models_name() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "forecast", "namespace": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    items = input_items(ResponsesBody.of({"input": [call, output]}).input, "resp_1")
    assert (items[0]["name"], items[0]["namespace"]) == ("forecast", "weather")
    assistant, tool = chat_messages(None, [], items, is_text=False)
    assert (assistant.tool_calls[0].name, tool.name) == ("weather__forecast", "weather__forecast")


@pytest.mark.parametrize(
    ("tool", "field", "reason"),
    [
        ({**WEATHER, "name": "a b"}, "tools[0].name", Reason.INVALID_FIELD),
        ({**WEATHER, "name": None}, "tools[0].name", Reason.INVALID_FIELD),
        ({**WEATHER, "name": "w" * 60}, "tools[0].tools[0].name", Reason.INVALID_FIELD),
        ({**WEATHER, "tools": None}, "tools[0].tools", Reason.INVALID_FIELD),
        ({**WEATHER, "tools": [{**FORECAST, "name": ""}]}, "tools[0].tools[0].name", Reason.INVALID_FIELD),
        ({**WEATHER, "tools": [WEATHER]}, "tools[0].tools[0].type", Reason.FEATURE_UNSUPPORTED),
        ({**WEATHER, "tools": [{"type": "custom"}]}, "tools[0].tools[0].type", Reason.FEATURE_UNSUPPORTED),
        ({"type": "web_search"}, "tools[0].type", Reason.FEATURE_UNSUPPORTED),
    ],
    ids=["a name", "no name", "long names", "no functions", "an empty name", "nested", "custom", "a search"],
)
def test_what_is_wrong_is_named(tool: dict[str, Any], field: str, reason: Reason) -> None:
    with pytest.raises(QuireError) as error:
        prompt(tools=[tool])
    assert (error.value.field, error.value.reason) == (field, reason)

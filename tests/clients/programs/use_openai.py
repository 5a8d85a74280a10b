"""The openai package: chats with parse, tools and the stream helpers, completions, responses, and errors."""

import json
import re
import time
from typing import Any

import openai

from checks import (
    BAD_SCHEMA,
    CHAT,
    GREEDY,
    MODEL,
    ONE_CALL,
    QUESTION,
    REPEAT,
    TOOL,
    WEATHER,
    Forecast,
    WeatherQuery,
    check,
    error_of,
    run,
)

client = openai.OpenAI(max_retries=0)
chats = client.chat.completions
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
TOOLS: Any = [TOOL]
SHORT: Any = {"temperature": 0, "max_output_tokens": 128}
ASKED: Any = [{"role": "user", "content": QUESTION}]
POLLED_SECONDS = 120


@check
def parse_returns_the_model() -> None:
    choice = chats.parse(model=MODEL, messages=CHAT, response_format=Forecast, **GREEDY).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Forecast)


@check
def response_format_takes_a_json_schema() -> None:
    schema: Any = {"name": "forecast", "strict": True, "schema": Forecast.model_json_schema()}
    chat = chats.create(
        model=MODEL, messages=CHAT, response_format={"type": "json_schema", "json_schema": schema}, **GREEDY
    )
    Forecast.model_validate_json(chat.choices[0].message.content or "")


@check
def json_object_gives_an_object() -> None:
    asked: Any = [{"role": "user", "content": REPEAT}]
    chat = chats.create(model=MODEL, messages=asked, response_format={"type": "json_object"}, **GREEDY)
    assert chat.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)


@check
def every_choice_of_several_is_valid() -> None:
    chat = chats.parse(model=MODEL, messages=CHAT, response_format=Forecast, n=3, temperature=1, max_tokens=128)
    assert [type(choice.message.parsed) for choice in chat.choices] == [Forecast] * 3


@check
def required_tools_are_called() -> None:
    choice = chats.create(
        model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=1024
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.id
        assert call.function.name == "get_weather"
        WeatherQuery.model_validate_json(call.function.arguments)


@check
def a_named_tool_is_called() -> None:
    choice = chats.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=NAMED, **GREEDY).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    WeatherQuery.model_validate_json(call.function.arguments)


@check
def parse_returns_the_arguments_of_a_strict_tool() -> None:
    tools = [openai.pydantic_function_tool(WeatherQuery)]
    choice = chats.parse(model=MODEL, messages=CHAT, tools=tools, tool_choice="required", **ONE_CALL).choices[0]
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, WeatherQuery)


QUERY = re.compile(r'SELECT "(name|age)"\nFROM [a-z]{1,8};')
GRAMMARS = {
    "lark": """
start: "SELECT " column LF "FROM " /[a-z]{1,8}/ ";"
column: "\\"" ("name" | "age") "\\""
%import common.LF
""",
    "regex": QUERY.pattern,
}


@check
def custom_tools_take_a_text_that_matches_a_grammar() -> None:
    for syntax, definition in GRAMMARS.items():
        form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        tools: Any = [{"type": "custom", "custom": {"name": "run", "description": "Runs SQL.", "format": form}}]
        named: Any = {"type": "custom", "custom": {"name": "run"}}
        choice = chats.create(model=MODEL, messages=CHAT, tools=tools, tool_choice=named, **GREEDY).choices[0]
        (call,) = choice.message.tool_calls or []
        assert call.type == "custom"
        assert QUERY.fullmatch(call.custom.input), call.custom.input
        result = {"role": "tool", "tool_call_id": call.id, "content": "Ann"}
        messages: Any = [*CHAT, choice.message, result]
        second = chats.create(model=MODEL, messages=messages, tools=tools, tool_choice="none", **GREEDY).choices[0]
        assert second.message.content


@check
def only_allowed_tools_are_called() -> None:
    other: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    choice = chats.create(model=MODEL, messages=CHAT, tools=[other, *TOOLS], tool_choice=allowed, **ONE_CALL).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    WeatherQuery.model_validate_json(call.function.arguments)


@check
def a_response_has_the_text_of_a_custom_tool() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": QUERY.pattern}
    tools: Any = [{"type": "custom", "name": "run", "format": form}]
    with client.responses.stream(
        model=MODEL, input=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False, **SHORT
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        (item,) = stream.get_final_response().output
    assert item.type == "custom_tool_call"
    assert "".join(deltas) == item.input
    assert QUERY.fullmatch(item.input), item.input


@check
def tools_may_be_switched_off() -> None:
    choice = chats.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="none", **GREEDY).choices[0]
    assert choice.message.content
    assert choice.message.tool_calls is None


@check
def a_turn_with_a_result_of_a_tool_is_answered() -> None:
    first = chats.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=NAMED, **GREEDY).choices[0].message
    (call,) = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    messages: Any = [*CHAT, first, result]
    second = chats.create(model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", **GREEDY).choices[0]
    assert second.message.content


@check
def the_stream_helper_parses_content() -> None:
    with chats.stream(model=MODEL, messages=CHAT, response_format=Forecast, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = (event for event in events if event.type == "content.done")
    assert len(deltas) > 1
    assert "".join(deltas) == done.content == final.content
    assert isinstance(final.parsed, Forecast)
    assert done.parsed == final.parsed


@check
def the_stream_helper_assembles_calls() -> None:
    tools = [openai.pydantic_function_tool(WeatherQuery)]
    with chats.stream(model=MODEL, messages=CHAT, tools=tools, tool_choice="required", **ONE_CALL) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert final.finish_reason == "tool_calls"
    calls = final.message.tool_calls or []
    assert len(done) == len(calls) >= 1
    for index, call in enumerate(calls):
        pieces = [event.arguments_delta for event in deltas if event.index == index]
        assert len(pieces) > 1, "the arguments arrive at once"
        assert "".join(pieces) == call.function.arguments == done[index].arguments
        assert isinstance(call.function.parsed_arguments, WeatherQuery)


@check
async def the_asynchronous_stream_has_the_same_calls_as_a_whole_answer() -> None:
    request: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": "required", **ONE_CALL}
    whole = chats.create(**request).choices[0].message.tool_calls or []
    async with (
        openai.AsyncOpenAI(max_retries=0) as asynchronous,
        asynchronous.chat.completions.stream(**request) as stream,
    ):
        streamed = (await stream.get_final_completion()).choices[0].message.tool_calls or []
    expected = [(call.function.name, call.function.arguments) for call in whole if call.type == "function"]
    assert [(call.function.name, call.function.arguments) for call in streamed] == expected


@check
def legacy_functions_are_called() -> None:
    functions: Any = [TOOL["function"]]
    message = (
        chats.create(model=MODEL, messages=CHAT, functions=functions, function_call={"name": "get_weather"}, **GREEDY)
        .choices[0]
        .message
    )
    assert message.function_call is not None
    assert message.function_call.name == "get_weather"
    WeatherQuery.model_validate_json(message.function_call.arguments)


@check
def completions_take_a_regex_as_an_extra_field() -> None:
    pattern = {"structured_outputs": {"regex": "(Oslo|Lima), [0-9]{1,2} degrees"}}
    answer = client.completions.create(model=MODEL, prompt="Weather:", extra_body=pattern, **GREEDY).choices[0]
    assert answer.finish_reason == "stop"
    city, _, degrees = answer.text.partition(", ")
    assert city in ("Oslo", "Lima")
    assert degrees.removesuffix(" degrees").isdigit()


@check
def a_streamed_completion_has_the_text_and_the_usage_of_a_whole_one() -> None:
    request: Any = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(**request)
    *parts, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **request)
    texts = [part.choices[0].text for part in parts]
    assert len(texts) > 2
    assert "".join(texts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert last.choices == []
    assert last.usage
    assert whole.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@check
def a_response_is_parsed() -> None:
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=Forecast, **SHORT)
    assert isinstance(response.output_parsed, Forecast)
    assert client.responses.retrieve(response.id).output_text == response.output_text


@check
def a_response_is_streamed_and_continues_after_an_event() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Forecast, **SHORT) as stream:
        events = list(stream)
        response = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == response.output_text
    assert isinstance(response.output_parsed, Forecast)
    rest = client.responses.retrieve(response.id, stream=True, starting_after=5)
    assert [event.sequence_number for event in rest] == list(range(6, len(events)))


@check
def a_conversation_of_responses_has_a_call_and_its_output() -> None:
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    first = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, **SHORT
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    WeatherQuery.model_validate_json(call.arguments)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    second = client.responses.create(model=MODEL, input=[output], previous_response_id=first.id, **SHORT)
    assert second.output_text
    again = client.responses.create(model=MODEL, input=[*ASKED, *map(_as_input, first.output), output], **SHORT)
    assert again.output_text == second.output_text


def _as_input(item: Any) -> Any:
    return item.to_dict()


@check
def a_response_in_the_background_is_retrieved_cancelled_and_deleted() -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, background=True, **SHORT)
    assert response.status in ("queued", "in_progress")
    ended = client.responses.cancel(response.id)
    assert ended.status in ("cancelled", "completed", "incomplete")
    assert client.responses.retrieve(response.id).status == ended.status
    items = client.responses.input_items.list(response.id)
    assert [item.to_dict()["content"] for item in items] == [[{"type": "input_text", "text": QUESTION}]]
    client.responses.delete(response.id)
    error = error_of(openai.NotFoundError, lambda: client.responses.retrieve(response.id))
    assert error.code == "request_unknown"


@check
def a_response_in_the_background_is_polled_to_its_end() -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, **SHORT)
    response = client.responses.create(model=MODEL, input=QUESTION, background=True, **SHORT)
    limit = time.monotonic() + POLLED_SECONDS
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < limit, response.status
        time.sleep(0.1)
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == (whole.status, whole.output_text)


@check
def a_stream_of_the_background_continues_after_its_client_left() -> None:
    with client.responses.create(model=MODEL, input=QUESTION, background=True, stream=True, **SHORT) as stream:
        events = [next(stream) for _ in range(6)]
    first = events[0]
    assert first.type == "response.created"
    assert (first.response.status, first.response.background) == ("queued", True)
    after = events[-1].sequence_number
    events += client.responses.retrieve(first.response.id, stream=True, starting_after=after)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text == client.responses.retrieve(first.response.id).output_text


def _refused(kind: type[openai.APIStatusError], **fields: Any) -> tuple[str | None, str | None]:
    """Code and field of the error of a response with these fields."""
    error = error_of(kind, lambda: client.responses.create(model=MODEL, input=QUESTION, **fields))
    return error.code, error.param


@check
def responses_have_errors_by_their_fields() -> None:
    for stream in (False, True):
        unstored = _refused(openai.BadRequestError, stream=stream, background=True, store=False)
        assert unstored == ("invalid_field", "background")
        assert _refused(openai.BadRequestError, stream=stream, temperature=3) == ("invalid_field", "temperature")
        unknown = _refused(openai.NotFoundError, stream=stream, previous_response_id=f"resp_{'0' * 48}")
        assert unknown == ("request_unknown", "previous_response_id")


@check
def a_hosted_tool_is_a_bad_request() -> None:
    tools: Any = [{"type": "web_search"}]
    error = error_of(openai.BadRequestError, lambda: client.responses.create(model=MODEL, input=QUESTION, tools=tools))
    assert (error.code, error.param) == ("feature_unsupported", "tools[0].type")


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    request: Any = {"model": MODEL, "messages": CHAT, "response_format": BAD_SCHEMA, **GREEDY}
    error = error_of(openai.BadRequestError, lambda: chats.create(**request))
    assert error.code == "grammar_invalid"
    assert str(error.param).startswith("response_format.json_schema")


@check
def parameters_of_a_tool_that_cannot_be_compiled_are_a_bad_request() -> None:
    function = TOOL["function"] | {"parameters": {"type": "object", "properties": {"city": {"type": "no such type"}}}}
    tools = [{"type": "function", "function": function}]
    request: Any = {"model": MODEL, "messages": CHAT, "tools": tools, "tool_choice": "required", **GREEDY}
    error = error_of(openai.BadRequestError, lambda: chats.create(**request))
    assert error.code == "grammar_invalid"
    assert str(error.param).startswith("tools")


@check
def a_choice_of_an_unknown_tool_is_a_bad_request() -> None:
    choice = {"type": "function", "function": {"name": "no_such_tool"}}
    request: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": choice, **GREEDY}
    error = error_of(openai.BadRequestError, lambda: chats.create(**request))
    assert str(error.param).startswith("tool_choice")


if __name__ == "__main__":
    run()

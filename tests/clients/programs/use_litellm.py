"""LiteLLM: structured output, tools, streams that are assembled, and responses."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of prices

import litellm

from checks import (
    BAD_SCHEMA,
    BASE_URL,
    CHAT,
    GREEDY,
    MODEL,
    QUESTION,
    TOOL,
    WEATHER,
    Forecast,
    WeatherQuery,
    check,
    error_of,
    run,
)

SERVER: dict[str, Any] = {"api_base": BASE_URL, "api_key": "none"}
ASKED: dict[str, Any] = {**SERVER, "model": f"openai/{MODEL}", "num_retries": 0}
REQUEST: dict[str, Any] = {**ASKED, "messages": CHAT, **GREEDY}
SHORT: dict[str, Any] = {**ASKED, "temperature": 0, "max_output_tokens": 128}
RESPONSE: dict[str, Any] = {**SHORT, "input": QUESTION}


def check_calls(message: Any) -> None:
    """Asserts that a message has a call, and that each call has valid arguments."""
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.id
        assert call.function.name == "get_weather"
        WeatherQuery.model_validate_json(call.function.arguments)


@check
def response_format_takes_a_model() -> None:
    answer = litellm.completion(response_format=Forecast, **REQUEST)
    assert answer.choices[0].finish_reason == "stop"
    Forecast.model_validate_json(answer.choices[0].message.content)


@check
def a_streamed_structure_is_assembled() -> None:
    chunks = list(litellm.completion(response_format=Forecast, stream=True, **REQUEST))
    assert len(chunks) > 2
    Forecast.model_validate_json(litellm.stream_chunk_builder(chunks).choices[0].message.content)


@check
def a_required_tool_is_called() -> None:
    choice = litellm.completion(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **REQUEST).choices[0]
    assert choice.finish_reason == "tool_calls"
    check_calls(choice.message)


@check
async def a_streamed_call_is_assembled() -> None:
    stream = await litellm.acompletion(
        tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True, **REQUEST
    )
    choice = litellm.stream_chunk_builder([chunk async for chunk in stream]).choices[0]
    assert choice.finish_reason == "tool_calls"
    check_calls(choice.message)


@check
def a_turn_with_a_result_of_a_tool_is_answered() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    message = litellm.completion(tools=[TOOL], tool_choice=named, **REQUEST).choices[0].message
    check_calls(message)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": WEATHER}
    turn = REQUEST | {"messages": [*CHAT, message.model_dump(), result]}
    assert litellm.completion(tools=[TOOL], tool_choice="none", **turn).choices[0].message.content


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    error = error_of(litellm.BadRequestError, lambda: litellm.completion(response_format=BAD_SCHEMA, **REQUEST))
    assert "response_format.json_schema" in str(error)


@check
def a_chat_beyond_the_context_has_an_error_of_its_own() -> None:
    long = {"role": "user", "content": "a b c " * 8_192}
    error_of(litellm.ContextWindowExceededError, lambda: litellm.completion(**REQUEST | {"messages": [long]}))


@check
async def a_response_has_the_same_text_whole_and_in_a_stream() -> None:
    whole = litellm.responses(**RESPONSE)
    assert whole.status in ("completed", "incomplete")
    assert 0 < whole.usage.output_tokens <= 128
    events = list(litellm.responses(stream=True, **RESPONSE))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    later = [event async for event in await litellm.aresponses(stream=True, **RESPONSE)]
    assert later[-1].response.output_text == whole.output_text


@check
async def a_response_has_the_format_of_a_model() -> None:
    Forecast.model_validate_json(litellm.responses(text_format=Forecast, **RESPONSE).output_text)
    later = await litellm.aresponses(text_format=Forecast, **RESPONSE)
    Forecast.model_validate_json(later.output_text)


@check
def a_conversation_of_responses_has_a_call_and_its_output() -> None:
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    first = litellm.responses(tools=[tool], tool_choice="required", parallel_tool_calls=False, **RESPONSE)
    (call,) = (item for item in first.output if item.type == "function_call")
    WeatherQuery.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    assert litellm.responses(input=[output], previous_response_id=first.id, **SHORT).output_text


@check
def a_response_is_retrieved_and_deleted() -> None:
    response = litellm.responses(**RESPONSE)
    where: dict[str, Any] = {"response_id": response.id, "custom_llm_provider": "openai", **SERVER}
    assert litellm.get_responses(**where).output_text == response.output_text
    assert litellm.delete_responses(**where).deleted
    # litellm takes every error of the type invalid_request_error for a bad request, as OpenAI's is, too.
    assert "request_unknown" in str(error_of(litellm.BadRequestError, lambda: litellm.get_responses(**where)))


@check
def a_value_out_of_range_of_a_response_is_a_bad_request() -> None:
    error = error_of(litellm.BadRequestError, lambda: litellm.responses(top_p=7, **RESPONSE))
    assert "top_p" in str(error)


if __name__ == "__main__":
    run()

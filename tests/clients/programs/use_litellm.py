"""LiteLLM: structured output, tools, and streams that are assembled."""

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
    TOOL,
    WEATHER,
    Forecast,
    WeatherQuery,
    check,
    error_of,
    run,
)

REQUEST: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": "none",
    "messages": CHAT,
    "num_retries": 0,
    **GREEDY,
}


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


if __name__ == "__main__":
    run()

"""LangChain: bind_tools, the three methods of with_structured_output, streams, and agents with structured responses.

By chat completions and by responses.
"""

from functools import reduce
from operator import add
from typing import Any

import openai
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from checks import (
    BAD_SCHEMA,
    CHAT,
    MODEL,
    QUESTION,
    REPEAT,
    WEATHER,
    City,
    Forecast,
    WeatherQuery,
    check,
    error_of,
    get_weather,
    run,
)

options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 128, "max_retries": 0}
model = ChatOpenAI(**options)
# A small model repeats a call until no further one is allowed.
one_call = ChatOpenAI(**options, model_kwargs={"parallel_tool_calls": False})
by_responses = ChatOpenAI(**options, use_responses_api=True)
one_call_by_responses = ChatOpenAI(**options, use_responses_api=True, model_kwargs={"parallel_tool_calls": False})


def check_calls(answer: Any) -> None:
    """Asserts that there is a call, and that each has valid arguments."""
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls
    assert answer.invalid_tool_calls == []
    for call in answer.tool_calls:
        assert call["name"] == "get_weather"
        assert call["id"]
        WeatherQuery.model_validate(call["args"])


@check
def structured_output_by_json_schema() -> None:
    answer = model.with_structured_output(Forecast, method="json_schema").invoke(QUESTION)
    assert isinstance(answer, Forecast)


@check
def structured_output_by_strict_json_schema() -> None:
    answer = model.with_structured_output(Forecast, method="json_schema", strict=True).invoke(QUESTION)
    assert isinstance(answer, Forecast)


@check
def structured_output_by_function_calling() -> None:
    answer = model.with_structured_output(Forecast, method="function_calling").invoke(QUESTION)
    assert isinstance(answer, Forecast)


@check
def structured_output_by_json_mode() -> None:
    assert isinstance(model.with_structured_output(City, method="json_mode").invoke(REPEAT), City)


@check
def structured_output_is_streamed() -> None:
    parts: list[Any] = list(model.with_structured_output(Forecast.model_json_schema()).stream(QUESTION))
    assert len(parts) > 1
    Forecast.model_validate(parts[-1])


@check
def a_bound_tool_is_called() -> None:
    for choice in ("any", "get_weather"):
        check_calls(one_call.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION))


@check
async def a_streamed_call_is_assembled() -> None:
    chunks = [chunk async for chunk in one_call.bind_tools([get_weather], tool_choice="any").astream(QUESTION)]
    assert sum(len(chunk.tool_call_chunks) for chunk in chunks if isinstance(chunk, AIMessageChunk)) > 2
    whole: Any = reduce(add, chunks)
    check_calls(whole)
    assert whole.response_metadata["finish_reason"] == "tool_calls"


@check
def a_turn_with_a_result_of_a_tool_is_answered() -> None:
    bound = one_call.bind_tools([get_weather], tool_choice="get_weather")
    call = bound.invoke(QUESTION)
    result = ToolMessage(WEATHER, tool_call_id=call.tool_calls[0]["id"])
    answer = one_call.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage(QUESTION), call, result])
    assert answer.content


@check
def an_agent_responds_with_a_structure() -> None:
    for strategy in (ToolStrategy(Forecast), ProviderStrategy(Forecast)):
        agent = create_agent(one_call, tools=[], response_format=strategy)
        assert isinstance(agent.invoke({"messages": CHAT})["structured_response"], Forecast)


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: model.bind(response_format=BAD_SCHEMA).invoke(QUESTION))
    assert error.code == "grammar_invalid"
    assert str(error.param).startswith("response_format.json_schema")


@check
def a_response_has_the_same_text_whole_and_in_a_stream() -> None:
    whole = by_responses.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata is not None
    assert 0 < whole.usage_metadata["output_tokens"] <= 128
    chunks = list(by_responses.stream(QUESTION))
    assert len(chunks) > 2
    streamed: Any = reduce(add, chunks)
    assert streamed.text == whole.text
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


@check
def structured_output_by_responses() -> None:
    for strict in (None, True):
        answer = by_responses.with_structured_output(Forecast, method="json_schema", strict=strict).invoke(QUESTION)
        assert isinstance(answer, Forecast)


@check
def a_bound_tool_is_called_by_responses() -> None:
    for choice in ("any", "get_weather"):
        check_calls(one_call_by_responses.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION))


@check
async def a_call_streamed_by_responses_is_assembled() -> None:
    bound = one_call_by_responses.bind_tools([get_weather], tool_choice="any")
    chunks = [chunk async for chunk in bound.astream(QUESTION)]
    assert len(chunks) > 2
    check_calls(reduce(add, chunks))


@check
def a_result_of_a_tool_is_answered_by_responses() -> None:
    call = one_call_by_responses.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION)
    messages = [HumanMessage(QUESTION), call, ToolMessage(WEATHER, tool_call_id=call.tool_calls[0]["id"])]
    continued = ChatOpenAI(**options, use_responses_api=True, use_previous_response_id=True)
    texts = [model.invoke(messages).text for model in (by_responses, continued)]
    assert texts[0]
    assert texts[0] == texts[1]


@check
def an_agent_by_responses_responds_with_a_structure() -> None:
    agent = create_agent(by_responses, tools=[], response_format=ProviderStrategy(Forecast))
    assert isinstance(agent.invoke({"messages": CHAT})["structured_response"], Forecast)


@check
def a_value_out_of_range_of_a_response_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: by_responses.bind(top_p=7).invoke(QUESTION))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

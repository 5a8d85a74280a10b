"""LangChain: bind_tools, the three methods of with_structured_output, streams, and agents with structured responses."""

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
        answer = one_call.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION)
        assert isinstance(answer, AIMessage)
        assert answer.tool_calls
        assert answer.invalid_tool_calls == []
        for call in answer.tool_calls:
            assert call["name"] == "get_weather"
            assert call["id"]
            WeatherQuery.model_validate(call["args"])


@check
async def a_streamed_call_is_assembled() -> None:
    chunks = [chunk async for chunk in one_call.bind_tools([get_weather], tool_choice="any").astream(QUESTION)]
    assert sum(len(chunk.tool_call_chunks) for chunk in chunks if isinstance(chunk, AIMessageChunk)) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.tool_calls
    for call in whole.tool_calls:
        WeatherQuery.model_validate(call["args"])
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


if __name__ == "__main__":
    run()

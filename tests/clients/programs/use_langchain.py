"""LangChain: with_structured_output, streams, and agents with structured responses."""

from typing import Any

import openai
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI

from checks import (
    BAD_SCHEMA,
    CHAT,
    MODEL,
    QUESTION,
    REPEAT,
    City,
    Forecast,
    check,
    error_of,
    run,
)

model = ChatOpenAI(model=MODEL, temperature=0, max_tokens=128, max_retries=0)


@check
def structured_output_by_json_schema() -> None:
    answer = model.with_structured_output(Forecast, method="json_schema").invoke(QUESTION)
    assert isinstance(answer, Forecast)


@check
def structured_output_by_strict_json_schema() -> None:
    answer = model.with_structured_output(Forecast, method="json_schema", strict=True).invoke(QUESTION)
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
def an_agent_responds_with_a_structure() -> None:
    agent = create_agent(model, tools=[], response_format=ProviderStrategy(Forecast))
    assert isinstance(agent.invoke({"messages": CHAT})["structured_response"], Forecast)


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: model.bind(response_format=BAD_SCHEMA).invoke(QUESTION))
    assert error.code == "grammar_invalid"
    assert str(error.param).startswith("response_format.json_schema")


if __name__ == "__main__":
    run()

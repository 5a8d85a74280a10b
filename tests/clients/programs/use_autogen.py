"""AutoGen: the model client's tools, structured output and streams, and an assistant agent."""

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import StructuredMessage
from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    ModelInfo,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from checks import BASE_URL, MODEL, QUESTION, WEATHER, Forecast, WeatherQuery, check, error_of, get_weather, run

info = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    family=ModelFamily.UNKNOWN,
    multiple_system_messages=True,
)
client = OpenAIChatCompletionClient(
    model=MODEL,
    base_url=BASE_URL,
    api_key="none",
    model_info=info,
    temperature=0,
    max_tokens=128,
    max_retries=0,
    parallel_tool_calls=False,  # a small model repeats a call until no further one is allowed
)
tool = FunctionTool(get_weather, description="Weather of a city.")
asked = [SystemMessage(content="You call tools."), UserMessage(content=QUESTION, source="user")]


def check_calls(result: CreateResult) -> list[FunctionCall]:
    """The calls of a result. Asserts that there is one, and that each has valid arguments."""
    assert result.finish_reason == "function_calls"
    assert isinstance(result.content, list)
    assert result.content
    for call in result.content:
        assert call.id
        assert call.name == "get_weather"
        WeatherQuery.model_validate_json(call.arguments)
    return result.content


@check
async def a_required_tool_is_called() -> None:
    check_calls(await client.create(asked, tools=[tool], tool_choice="required"))


@check
async def a_streamed_call_is_assembled() -> None:
    parts = [part async for part in client.create_stream(asked, tools=[tool], tool_choice="required")]
    assert isinstance(parts[-1], CreateResult)
    check_calls(parts[-1])


@check
async def structured_output_is_valid() -> None:
    result = await client.create(asked, json_output=Forecast)
    assert isinstance(result.content, str)
    Forecast.model_validate_json(result.content)


@check
async def a_turn_with_a_result_of_a_tool_is_answered() -> None:
    calls = check_calls(await client.create(asked, tools=[tool], tool_choice="required"))
    results = [
        FunctionExecutionResult(content=WEATHER, name=call.name, call_id=call.id, is_error=False) for call in calls
    ]
    turn = [*asked, AssistantMessage(content=calls, source="agent"), FunctionExecutionResultMessage(content=results)]
    answer = await client.create(turn, tools=[tool], tool_choice="none")
    assert isinstance(answer.content, str)
    assert answer.content


@check
async def an_agent_responds_with_a_structure() -> None:
    agent = AssistantAgent("forecaster", model_client=client, output_content_type=Forecast)
    message = (await agent.run(task=QUESTION)).messages[-1]
    assert isinstance(message, StructuredMessage)
    assert isinstance(message.content, Forecast)


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    hot = {"top_p": 7}
    error = error_of(openai.BadRequestError, lambda: client.create(asked, extra_create_args=hot))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

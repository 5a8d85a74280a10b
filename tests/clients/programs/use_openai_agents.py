"""The OpenAI Agents SDK with its models for chat completions and for responses: tools, output types, and streams."""

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import ResponseFunctionToolCall

from checks import MODEL, QUESTION, WEATHER, Forecast, WeatherQuery, check, error_of, get_weather, run

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model=MODEL, openai_client=openai.AsyncOpenAI(max_retries=0))
by_responses = OpenAIResponsesModel(model=MODEL, openai_client=openai.AsyncOpenAI(max_retries=0))
settings = ModelSettings(temperature=0, max_tokens=128)
forced = ModelSettings(temperature=0, max_tokens=128, tool_choice="required", parallel_tool_calls=False)


@check
async def output_has_its_type() -> None:
    agent = Agent(name="forecaster", model=model, model_settings=settings, output_type=Forecast)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Forecast)


@check
async def output_is_streamed() -> None:
    agent = Agent(name="forecaster", model=model, model_settings=settings, output_type=Forecast)
    stream = Runner.run_streamed(agent, QUESTION)
    events = [event async for event in stream.stream_events()]
    assert len(events) > 2
    assert isinstance(stream.final_output, Forecast)


@check
async def a_tool_is_called_and_its_result_ends_the_run() -> None:
    agent = Agent(
        name="observer",
        instructions="Answer with the tool.",
        model=model,
        model_settings=forced,
        tools=[function_tool(get_weather)],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(agent, QUESTION)
    assert result.final_output == WEATHER
    (call,) = (item.raw_item for item in result.new_items if isinstance(item, ToolCallItem))
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.call_id
    WeatherQuery.model_validate_json(call.arguments)


@check
async def a_turn_with_a_result_of_a_tool_is_answered_in_a_stream() -> None:
    agent = Agent(name="observer", model=model, model_settings=forced, tools=[function_tool(get_weather)])
    stream = Runner.run_streamed(agent, QUESTION, max_turns=4)
    async for _ in stream.stream_events():
        pass
    outputs = [item.output for item in stream.new_items if isinstance(item, ToolCallOutputItem)]
    assert outputs
    assert outputs == [WEATHER] * len(outputs)
    assert stream.final_output


@check
async def a_run_by_responses_has_a_typed_output() -> None:
    agent = Agent(name="forecaster", model=by_responses, model_settings=settings, output_type=Forecast)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Forecast)


@check
async def a_run_by_responses_calls_a_tool_in_a_stream() -> None:
    agent = Agent(name="observer", model=by_responses, model_settings=forced, tools=[function_tool(get_weather)])
    stream = Runner.run_streamed(agent, QUESTION, max_turns=4)
    async for _ in stream.stream_events():
        pass
    outputs = [item.output for item in stream.new_items if isinstance(item, ToolCallOutputItem)]
    assert outputs
    assert outputs == [WEATHER] * len(outputs)
    assert stream.final_output


@check
async def a_conversation_by_responses_continues_on_the_server() -> None:
    # The SDK raises an error about an answer that was cut.
    unlimited = ModelSettings(temperature=0)
    agent = Agent(name="talker", instructions="Answer in one word.", model=by_responses, model_settings=unlimited)
    first = await Runner.run(agent, QUESTION)
    second = await Runner.run(agent, "And tomorrow?", previous_response_id=first.last_response_id)
    assert second.final_output
    client = openai.AsyncOpenAI(max_retries=0)
    assert second.last_response_id is not None
    items = [item async for item in client.responses.input_items.list(second.last_response_id, order="asc")]
    assert len(items) == 3


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    agent = Agent(name="hot", model=model, model_settings=ModelSettings(top_p=7))
    error = error_of(openai.BadRequestError, lambda: Runner.run(agent, QUESTION))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

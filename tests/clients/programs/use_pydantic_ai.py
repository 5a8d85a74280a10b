"""Pydantic AI: the three kinds of structured output, tools, and streams."""

from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from checks import BASE_URL, MODEL, QUESTION, REPEAT, WEATHER, City, Forecast, WeatherQuery, check, error_of, run

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
# A small model repeats a call until no further one is allowed.
settings = ModelSettings(temperature=0, max_tokens=128, parallel_tool_calls=False)


@check
def output_of_a_tool() -> None:
    agent = Agent(model, output_type=ToolOutput(Forecast), model_settings=settings, retries=0)
    assert isinstance(agent.run_sync(QUESTION).output, Forecast)


@check
def native_output() -> None:
    for strict in (None, True):
        agent = Agent(model, output_type=NativeOutput(Forecast, strict=strict), model_settings=settings, retries=0)
        assert isinstance(agent.run_sync(QUESTION).output, Forecast)


@check
def prompted_output() -> None:
    agent = Agent(model, output_type=PromptedOutput(City, template=False), model_settings=settings, retries=0)
    assert isinstance(agent.run_sync(REPEAT).output, City)


@check
async def output_is_streamed() -> None:
    for kind in (ToolOutput(Forecast), NativeOutput(Forecast)):
        agent = Agent(model, output_type=kind, model_settings=settings, retries=0)
        async with agent.run_stream(QUESTION) as stream:
            parts = [part async for part in stream.stream_output(debounce_by=None)]
            assert isinstance(await stream.get_output(), Forecast)
        assert parts


@check
def a_tool_is_called_and_its_result_is_used() -> None:
    tool = ToolDefinition(name="get_weather", parameters_json_schema=WeatherQuery.model_json_schema())
    question = ModelRequest.user_text_prompt(QUESTION)
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    response = model_request_sync(model, [question], model_settings=settings, model_request_parameters=parameters)
    assert response.finish_reason == "tool_call"
    assert response.tool_calls
    for call in response.tool_calls:
        assert call.tool_call_id
        WeatherQuery.model_validate(call.args_as_dict())
    results = [ToolReturnPart("get_weather", WEATHER, call.tool_call_id) for call in response.tool_calls]
    agent = Agent(model, output_type=ToolOutput(Forecast), model_settings=settings, retries=0)
    history = [question, response, ModelRequest(results)]
    assert isinstance(agent.run_sync(message_history=history).output, Forecast)


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    agent = Agent(model, model_settings=ModelSettings(temperature=0, top_p=7), retries=0)
    error = error_of(ModelHTTPError, lambda: agent.run_sync(QUESTION))
    assert error.status_code == 400
    assert isinstance(error.body, dict)
    assert (error.body["code"], error.body["param"]) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

"""The OpenAI Agents SDK with its model for chat completions: output types and streams."""

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)

from checks import MODEL, QUESTION, Forecast, check, error_of, run

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model=MODEL, openai_client=openai.AsyncOpenAI(max_retries=0))
settings = ModelSettings(temperature=0, max_tokens=128)


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
def a_value_out_of_range_is_a_bad_request() -> None:
    agent = Agent(name="hot", model=model, model_settings=ModelSettings(top_p=7))
    error = error_of(openai.BadRequestError, lambda: Runner.run(agent, QUESTION))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

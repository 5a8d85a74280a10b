"""Pydantic AI: native and prompted output, and streams."""

from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from checks import BASE_URL, MODEL, QUESTION, REPEAT, City, Forecast, check, error_of, run

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
settings = ModelSettings(temperature=0, max_tokens=128)


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
    agent = Agent(model, output_type=NativeOutput(Forecast), model_settings=settings, retries=0)
    async with agent.run_stream(QUESTION) as stream:
        parts = [part async for part in stream.stream_output(debounce_by=None)]
        assert isinstance(await stream.get_output(), Forecast)
    assert parts


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    agent = Agent(model, model_settings=ModelSettings(temperature=0, top_p=7), retries=0)
    error = error_of(ModelHTTPError, lambda: agent.run_sync(QUESTION))
    assert error.status_code == 400
    assert isinstance(error.body, dict)
    assert (error.body["code"], error.body["param"]) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

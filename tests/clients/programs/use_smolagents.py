"""smolagents: calls of tools by the model, structured output, and an agent's steps."""

from typing import ClassVar, Literal

import openai
from smolagents import OpenAIModel, Tool, ToolCallingAgent, tool
from smolagents.models import ChatMessage, ChatMessageStreamDelta, MessageRole, agglomerate_stream_deltas

from checks import BASE_URL, MODEL, QUESTION, WEATHER, Forecast, WeatherQuery, check, error_of, run

model = OpenAIModel(
    MODEL,
    api_base=BASE_URL,
    api_key="none",
    client_kwargs={"max_retries": 0},
    temperature=0,
    max_tokens=128,
    parallel_tool_calls=False,  # a small model repeats a call until no further one is allowed
)
MESSAGES = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


@tool
def get_weather(city: Literal["Berlin", "Lima", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Weather of a city.

    Args:
        city: The city.
        unit: The unit of the temperature.
    """
    WeatherQuery(city=city, unit=unit)
    return WEATHER


class FinalAnswer(Tool):
    """Ends an agent's run with one of a few answers, so that the call is short."""

    name = "final_answer"
    description = "Gives the final answer."
    inputs: ClassVar = {"answer": {"type": "string", "description": "The answer.", "enum": ["rain", "sun", "snow"]}}
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


def check_calls(message: ChatMessage) -> None:
    """Asserts that a message has a call, and that each call has valid arguments."""
    parsed = model.parse_tool_calls(message)
    assert parsed.tool_calls
    for call in parsed.tool_calls:
        assert call.id
        assert call.function.name == "get_weather"
        WeatherQuery.model_validate(call.function.arguments)


@check
def the_model_calls_a_tool() -> None:
    check_calls(model.generate(MESSAGES, tools_to_call_from=[get_weather]))


@check
def a_streamed_call_is_assembled() -> None:
    deltas: list[ChatMessageStreamDelta] = list(model.generate_stream(MESSAGES, tools_to_call_from=[get_weather]))
    assert len(deltas) > 2
    check_calls(agglomerate_stream_deltas(deltas))


@check
def response_format_takes_a_json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": Forecast.model_json_schema()}}
    Forecast.model_validate_json(str(model.generate(MESSAGES, response_format=form).content))


@check
def an_agent_calls_tools_until_it_answers() -> None:
    for streamed in (False, True):
        agent = ToolCallingAgent(
            tools=[get_weather, FinalAnswer()], model=model, max_steps=3, stream_outputs=streamed, verbosity_level=0
        )
        agent.run(QUESTION)
        steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
        assert steps
        for step in steps:
            assert step.error is None, step.error
            for call in step.tool_calls:
                assert call.name in ("get_weather", "final_answer")


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    error = error_of(openai.BadRequestError, lambda: model.generate(MESSAGES, top_p=7))
    assert (error.code, error.param) == ("invalid_field", "top_p")


if __name__ == "__main__":
    run()

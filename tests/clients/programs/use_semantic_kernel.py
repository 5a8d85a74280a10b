"""Semantic Kernel: chats, streams, structured output, functions that the program or the kernel calls, and errors."""

from enum import StrEnum
from functools import reduce
from operator import add
from typing import Annotated, Any

import openai
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, FunctionCallContent, FunctionResultContent
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import KernelArguments, kernel_function

from checks import BAD_SCHEMA, MODEL, QUESTION, WEATHER, Forecast, WeatherQuery, check, error_of, run


class Place(StrEnum):
    """The kernel makes schemas of enumerations, not of literals."""

    BERLIN = "Berlin"
    LIMA = "Lima"
    OSLO = "Oslo"


class Unit(StrEnum):
    """Units of the temperature."""

    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Weather:
    """A plugin with one function."""

    @kernel_function(name="get_weather", description="Weather of a city.")
    def get_weather(self, city: Annotated[Place, "The city."], unit: Annotated[Unit, "The unit."]) -> str:
        """Weather of a city."""
        WeatherQuery.model_validate({"city": city, "unit": unit})
        return WEATHER


kernel = Kernel()
kernel.add_plugin(Weather(), plugin_name="weather")
model = OpenAIChatCompletion(ai_model_id=MODEL, async_client=openai.AsyncOpenAI(max_retries=0))


def settings(**fields: Any) -> OpenAIChatPromptExecutionSettings:
    """The settings of a request."""
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=128, **fields)


def tool_settings(auto_invoke: bool) -> OpenAIChatPromptExecutionSettings:
    """Settings of a request that must call the function. A small model repeats a call unless only one is allowed."""
    behavior = FunctionChoiceBehavior.Required(auto_invoke=auto_invoke)
    return settings(function_choice_behavior=behavior, parallel_tool_calls=False)


def asked() -> ChatHistory:
    """A new conversation with the question."""
    history = ChatHistory()
    history.add_user_message(QUESTION)
    return history


async def answer(history: ChatHistory, how: OpenAIChatPromptExecutionSettings) -> ChatMessageContent:
    """The only message that answers."""
    (message,) = await model.get_chat_message_contents(history, how, kernel=kernel)
    return message


async def streamed(history: ChatHistory, how: OpenAIChatPromptExecutionSettings) -> Any:
    """The answer of a stream, assembled. Asserts that it has several parts."""
    parts = [part async for (part,) in model.get_streaming_chat_message_contents(history, how, kernel=kernel)]
    assert len(parts) > 2
    return reduce(add, parts)


def tokens_of(message: ChatMessageContent) -> tuple[int, int]:
    """The numbers of tokens of the prompt and of the answer."""
    usage = message.metadata["usage"]
    return usage.prompt_tokens, usage.completion_tokens


def check_call(message: ChatMessageContent) -> None:
    """Asserts that a message calls the function with valid arguments."""
    (call,) = (item for item in message.items if isinstance(item, FunctionCallContent))
    assert call.id
    assert (call.plugin_name, call.function_name) == ("weather", "get_weather")
    WeatherQuery.model_validate(call.parse_arguments())


@check
async def a_chat_has_text_and_usage() -> None:
    message = await answer(asked(), settings())
    assert message.content
    assert message.finish_reason in ("stop", "length")
    prompt_tokens, completion_tokens = tokens_of(message)
    assert prompt_tokens > 0
    assert 0 < completion_tokens <= 128


@check
async def a_stream_has_the_same_text() -> None:
    whole = await answer(asked(), settings())
    assembled = await streamed(asked(), settings())
    assert assembled.content == whole.content
    assert tokens_of(assembled) == tokens_of(whole)


@check
async def a_prompt_of_the_kernel_is_answered() -> None:
    kernel.add_service(model, overwrite=True)
    arguments = KernelArguments(settings=settings(), name="Ada")
    result = await kernel.invoke_prompt("Say hello to {{$name}}.", arguments=arguments)
    assert str(result)


@check
async def structured_output_is_valid() -> None:
    message = await answer(asked(), settings(response_format=Forecast))
    Forecast.model_validate_json(message.content)


@check
async def structured_output_is_streamed() -> None:
    message = await streamed(asked(), settings(response_format=Forecast))
    Forecast.model_validate_json(message.content)


@check
async def a_required_function_is_called() -> None:
    message = await answer(asked(), tool_settings(auto_invoke=False))
    assert message.finish_reason == "tool_calls"
    check_call(message)


@check
async def a_streamed_call_is_assembled() -> None:
    check_call(await streamed(asked(), tool_settings(auto_invoke=False)))


@check
async def the_kernel_calls_the_function_and_sends_its_result() -> None:
    history = asked()
    message = await answer(history, tool_settings(auto_invoke=True))
    check_call(history.messages[1])
    (result,) = history.messages[2].items
    assert isinstance(result, FunctionResultContent)
    assert result.result == WEATHER
    assert message.content


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    how = settings(response_format=BAD_SCHEMA)
    error = error_of(ServiceResponseException, lambda: answer(asked(), how))
    assert isinstance(error.__cause__, openai.BadRequestError)
    assert error.__cause__.code == "grammar_invalid"


if __name__ == "__main__":
    run()

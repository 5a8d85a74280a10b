"""The anthropic package: messages, streams, tools, results of tools, numbers of tokens, and errors."""

from typing import Any, Literal, get_type_hints

import anthropic
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params

from checks import BASE_URL, CHAT, MODEL, TOOL, WEATHER, Forecast, WeatherQuery, assert_fields, check, error_of, run

client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none", max_retries=0)
FUNCTION = TOOL["function"]
TOOLS: Any = [
    {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
]
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}
REQUEST: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 128, "extra_body": {"temperature": 0}}
"""The client has no arguments for sampling any more."""


def the_call(message: Any) -> Any:
    """The one call of a message, whose arguments are valid."""
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    WeatherQuery.model_validate(call.input)
    return call


@check
def a_message_has_text_and_usage() -> None:
    message = client.messages.create(system="Be brief.", **REQUEST)
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert message.id == f"msg_{message._request_id}"
    assert message.stop_reason in ("end_turn", "max_tokens")
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0
    assert usage.output_tokens > 0


@check
def tokens_are_counted() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens
    usage = client.messages.create(**REQUEST).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check
def models_are_listed() -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.created_at.year > 2000) == (MODEL, "model", True)
    assert client.models.retrieve(MODEL) == model


@check
def a_stop_sequence_ends_the_message() -> None:
    text = client.messages.create(**REQUEST).content[0].text
    stop = text.split()[2]
    message = client.messages.create(stop_sequences=[stop], **REQUEST)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


@check
def a_stream_is_assembled() -> None:
    whole = client.messages.create(**REQUEST)
    with client.messages.stream(**REQUEST) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 2
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def events_have_the_types_of_the_client() -> None:
    kinds = [event.type for event in client.messages.create(stream=True, **REQUEST)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@check
async def asynchronous_streams_work() -> None:
    aio = anthropic.AsyncAnthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none", max_retries=0)
    async with aio.messages.stream(**REQUEST) as stream:
        assert "".join([text async for text in stream.text_stream])


@check
def a_required_tool_is_called() -> None:
    message = client.messages.create(tools=TOOLS, tool_choice=ONE_CALL, **REQUEST)
    assert message.stop_reason == "tool_use"
    assert the_call(message).id


@check
def a_streamed_call_is_assembled() -> None:
    with client.messages.stream(tools=TOOLS, tool_choice=ONE_CALL, **REQUEST) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert "input_json" in kinds
    assert message.stop_reason == "tool_use"
    the_call(message)


@check
def a_turn_with_a_result_of_a_tool_is_answered() -> None:
    named: Any = {"type": "tool", "name": "get_weather"}
    message = client.messages.create(tools=TOOLS, tool_choice=named, **REQUEST)
    result: Any = {"type": "tool_result", "tool_use_id": the_call(message).id, "content": WEATHER}
    turn: Any = [*CHAT, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(tools=TOOLS, tool_choice={"type": "none"}, **REQUEST | {"messages": turn})
    assert answer.content[0].type == "text"


@check
def a_tool_runner_calls_functions_and_sends_their_results() -> None:
    calls = []

    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
        """Returns the weather in a city."""
        calls.append({"city": city, "unit": unit})
        return WEATHER

    tools: Any = [anthropic.beta_tool(get_weather)]
    runner = client.beta.messages.tool_runner(tools=tools, tool_choice=ONE_CALL, max_iterations=2, **REQUEST)
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert calls == [the_call(message).input for message in messages]


@check
def an_output_format_gives_an_object() -> None:
    form: Any = {"format": {"type": "json_schema", "schema": Forecast.model_json_schema()}}
    message = client.messages.create(output_config=form, **REQUEST)
    Forecast.model_validate_json(message.content[0].text)


@check
def the_fields_of_requests_are_those_that_the_page_of_parameters_has() -> None:
    types = {
        "MessageCreateParams": message_create_params.MessageCreateParamsStreaming,
        "MessageCountTokensParams": message_count_tokens_params.MessageCountTokensParams,
        "BetaMessageCreateParams": beta_create_params.MessageCreateParamsStreaming,
    }
    headers = {"betas", "user_profile_id", "workspace_id"}  # that are sent as such
    fields = {name: get_type_hints(kind).keys() - headers for name, kind in types.items()}
    assert_fields("anthropic", anthropic.__version__, fields)


@check
def errors_have_the_types_of_the_client() -> None:
    bad = error_of(
        anthropic.BadRequestError, lambda: client.messages.create(**REQUEST | {"extra_body": {"temperature": 3}})
    )
    assert "temperature: must be between" in str(bad)
    error_of(anthropic.NotFoundError, lambda: client.messages.create(**REQUEST | {"model": "claude"}))
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/"}}]}]
    refused = error_of(anthropic.BadRequestError, lambda: client.messages.create(**REQUEST | {"messages": image}))
    assert "messages[0].content[0].type" in str(refused)


if __name__ == "__main__":
    run()

"""The openai package: parse, response_format, the stream helper, and errors."""

import json
from typing import Any

import openai

from checks import BAD_SCHEMA, CHAT, GREEDY, MODEL, REPEAT, Forecast, check, error_of, run

client = openai.OpenAI(max_retries=0)
chats = client.chat.completions


@check
def parse_returns_the_model() -> None:
    choice = chats.parse(model=MODEL, messages=CHAT, response_format=Forecast, **GREEDY).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Forecast)


@check
def response_format_takes_a_json_schema() -> None:
    schema: Any = {"name": "forecast", "strict": True, "schema": Forecast.model_json_schema()}
    chat = chats.create(
        model=MODEL, messages=CHAT, response_format={"type": "json_schema", "json_schema": schema}, **GREEDY
    )
    Forecast.model_validate_json(chat.choices[0].message.content or "")


@check
def json_object_gives_an_object() -> None:
    asked: Any = [{"role": "user", "content": REPEAT}]
    chat = chats.create(model=MODEL, messages=asked, response_format={"type": "json_object"}, **GREEDY)
    assert chat.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)


@check
def every_choice_of_several_is_valid() -> None:
    chat = chats.parse(model=MODEL, messages=CHAT, response_format=Forecast, n=3, temperature=1, max_tokens=128)
    assert [type(choice.message.parsed) for choice in chat.choices] == [Forecast] * 3


@check
def the_stream_helper_parses_content() -> None:
    with chats.stream(model=MODEL, messages=CHAT, response_format=Forecast, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = (event for event in events if event.type == "content.done")
    assert len(deltas) > 1
    assert "".join(deltas) == done.content == final.content
    assert isinstance(final.parsed, Forecast)
    assert done.parsed == final.parsed


@check
def completions_take_a_regex_as_an_extra_field() -> None:
    pattern = {"structured_outputs": {"regex": "(Oslo|Lima), [0-9]{1,2} degrees"}}
    answer = client.completions.create(model=MODEL, prompt="Weather:", extra_body=pattern, **GREEDY).choices[0]
    assert answer.finish_reason == "stop"
    city, _, degrees = answer.text.partition(", ")
    assert city in ("Oslo", "Lima")
    assert degrees.removesuffix(" degrees").isdigit()


@check
def a_schema_that_cannot_be_compiled_is_a_bad_request() -> None:
    request: Any = {"model": MODEL, "messages": CHAT, "response_format": BAD_SCHEMA, **GREEDY}
    error = error_of(openai.BadRequestError, lambda: chats.create(**request))
    assert error.code == "grammar_invalid"
    assert str(error.param).startswith("response_format.json_schema")


if __name__ == "__main__":
    run()

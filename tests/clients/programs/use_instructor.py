"""Instructor in the modes TOOLS, JSON and JSON_SCHEMA, and its streams of parts and of several objects."""

from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException

from checks import CHAT, GREEDY, MODEL, City, Forecast, check, error_of, run


def connect(mode: instructor.Mode) -> instructor.Instructor:
    """A client in a mode."""
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


def check_forecast(mode: instructor.Mode) -> None:
    """An answer in this mode is an object of the model's class."""
    answer = connect(mode).chat.completions.create(
        model=MODEL, messages=CHAT, response_model=Forecast, max_retries=0, **GREEDY
    )
    assert isinstance(answer, Forecast)


@check
def tools() -> None:
    check_forecast(instructor.Mode.TOOLS)


@check
def tools_strict() -> None:
    check_forecast(instructor.Mode.TOOLS_STRICT)


@check
def json_schema() -> None:
    check_forecast(instructor.Mode.JSON_SCHEMA)


@check
def json() -> None:
    client = connect(instructor.Mode.JSON)
    # The prompt has the schema, which the model would repeat without examples.
    asked: list[Any] = []
    for city in ("Paris", "Lima"):
        asked += [
            {"role": "user", "content": city},
            {"role": "assistant", "content": City(city=city).model_dump_json()},
        ]
    asked.append({"role": "user", "content": "Oslo"})
    answer = client.chat.completions.create(model=MODEL, messages=asked, response_model=City, max_retries=0, **GREEDY)
    assert isinstance(answer, City)


@check
def parts_are_streamed() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        parts = list(
            connect(mode).chat.completions.create_partial(
                model=MODEL, messages=CHAT, response_model=Forecast, max_retries=0, **GREEDY
            )
        )
        assert len(parts) > 2
        Forecast.model_validate(parts[-1].model_dump())


@check
def a_value_out_of_range_is_a_bad_request() -> None:
    chats = connect(instructor.Mode.TOOLS).chat.completions
    request = {"model": MODEL, "messages": CHAT, "response_model": Forecast, "max_retries": 0, "top_p": 7}
    assert "top_p" in str(error_of(InstructorRetryException, lambda: chats.create(**request)))


if __name__ == "__main__":
    run()

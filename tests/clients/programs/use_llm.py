"""The llm command line and library, with extra-openai-models.yaml: prompts, streams, schemas, tools, responses."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import llm
import openai
from click.testing import CliRunner
from llm.cli import cli

from checks import BASE_URL, MODEL, QUESTION, WEATHER, Forecast, WeatherQuery, check, error_of, get_weather, run

FOLDER = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = FOLDER.name

CHAT, COMPLETION, RESPONSES = "quire", "quire-completion", "quire-responses"
ENTRY: dict[str, Any] = {"model_name": MODEL, "api_base": BASE_URL, "supports_schema": True, "supports_tools": True}
ENTRIES = [
    ENTRY | {"model_id": CHAT},
    ENTRY | {"model_id": COMPLETION, "completion": True},
    ENTRY | {"model_id": RESPONSES, "responses": True},
]
Path(FOLDER.name, "extra-openai-models.yaml").write_text(json.dumps(ENTRIES))  # JSON is YAML

OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 128}
FLAGS = [flag for name, value in OPTIONS.items() for flag in ("--option", name, str(value))]


def command(*arguments: str) -> str:
    """What the command line prints. Raises the error of the command."""
    done = CliRunner().invoke(cli, list(arguments), input="", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def prompt(*arguments: str, model: str = CHAT) -> str:
    """The answer to the question that the command line prints."""
    return command("prompt", QUESTION, "--model", model, *FLAGS, *arguments)


@check
def the_models_of_the_file_are_listed() -> None:
    listed = command("models", "list")
    assert all(f": {entry['model_id']}" in listed for entry in ENTRIES)


@check
def a_prompt_is_answered_alike_whole_in_a_stream_and_asynchronously() -> None:
    whole = prompt("--no-stream")
    assert whole.strip()
    assert prompt() == prompt("--async") == whole


@check
def a_conversation_continues_and_its_tokens_are_logged() -> None:
    prompt()
    assert command("prompt", "And in Lima?", "--continue", *FLAGS).strip()
    first, second = json.loads(command("logs", "list", "--json", "--count", "2"))
    assert first["conversation_id"] == second["conversation_id"]
    assert 0 < first["input_tokens"] < second["input_tokens"]
    assert 0 < second["output_tokens"] <= OPTIONS["max_tokens"]


@check
def a_schema_gives_an_object() -> None:
    for model in (CHAT, RESPONSES):
        for how in ("--no-stream", "--async"):
            Forecast.model_validate_json(prompt(how, "--schema", json.dumps(Forecast.model_json_schema()), model=model))


@check
def a_prompt_by_completions_is_continued() -> None:
    assert prompt("--no-stream", model=COMPLETION) == prompt(model=COMPLETION)


@check
def a_prompt_by_responses_is_answered_alike_whole_and_in_a_stream() -> None:
    """With a schema, so that the answer ends by itself: llm takes the usage of such streams only."""
    model = llm.get_model(RESPONSES)
    whole, stream = (model.prompt(QUESTION, stream=way, schema=Forecast, options=OPTIONS) for way in (False, True))
    parts = list(stream)
    assert len(parts) > 2
    assert "".join(parts) == whole.text()
    assert stream.usage().output == whole.usage().output > 0


@check
def a_model_may_call_a_tool() -> None:
    """Nothing in llm requires a call, and a small model may make none, or some of which none is the last."""
    answer = llm.get_model(CHAT).prompt(QUESTION, tools=[get_weather], options=OPTIONS)
    assert answer.tool_calls() or answer.text()
    for call in answer.tool_calls():
        assert call.name == "get_weather"
        WeatherQuery.model_validate(call.arguments)


@check
def the_result_of_a_tool_is_sent_and_answered() -> None:
    arguments = WeatherQuery(city="Oslo", unit="celsius").model_dump()
    call = llm.parts.ToolCallPart(name="get_weather", arguments=arguments, tool_call_id="call_1")
    messages = [llm.user(QUESTION), llm.assistant(call)]
    for name in (CHAT, RESPONSES):
        chain = llm.get_model(name).chain(messages=messages, tools=[get_weather], options=OPTIONS)
        first = next(iter(chain.responses()))
        (result,) = first.prompt.tool_results
        assert result.output == WEATHER
        assert first.text() or first.tool_calls()


@check
async def the_asynchronous_library_streams() -> None:
    for name in (CHAT, RESPONSES):
        answer = llm.get_async_model(name).prompt(QUESTION, options=OPTIONS)
        parts = [part async for part in answer]
        assert len(parts) > 2
        assert "".join(parts) == await answer.text()


@check
def a_prompt_that_does_not_fit_is_a_bad_request() -> None:
    long = llm.get_model(CHAT).prompt("word " * 20_000, options=OPTIONS)
    assert error_of(openai.BadRequestError, long.text).code == "context_length_exceeded"


if __name__ == "__main__":
    run()

"""The ollama package: chats, streams, tools, results of tools, formats, models, and errors."""

from importlib.metadata import version
from typing import Any

import ollama
from ollama import _types

from checks import (
    BASE_URL,
    CHAT,
    MODEL,
    REPEAT,
    TOOL,
    WEATHER,
    Forecast,
    assert_fields,
    check,
    error_of,
    get_weather,
    run,
)

client = ollama.Client(host=BASE_URL.removesuffix("/v1"))
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 64, "num_ctx": 2048}
REQUEST: dict[str, Any] = {"model": MODEL, "messages": CHAT, "options": OPTIONS}


@check
def a_chat_has_text_and_counts() -> None:
    answer = client.chat(**REQUEST)
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert answer.done
    assert answer.done_reason in ("stop", "length")
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert answer.total_duration
    assert answer.total_duration >= (answer.eval_duration or 0)


@check
def a_stream_has_the_same_text() -> None:
    whole = client.chat(**REQUEST)
    parts = list(client.chat(stream=True, **REQUEST))
    assert len(parts) > 2
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


@check
async def asynchronous_streams_work() -> None:
    aio = ollama.AsyncClient(host=BASE_URL.removesuffix("/v1"))
    assert "".join([part.message.content or "" async for part in await aio.chat(stream=True, **REQUEST)])


@check
def a_prompt_is_answered_and_a_raw_one_continued() -> None:
    answer = client.generate(model=MODEL, prompt="Say hello.", system="Be brief.", options=OPTIONS)
    assert answer.response
    raw = client.generate(model=MODEL, prompt="One, two,", raw=True, options=OPTIONS)
    assert raw.response
    parts = list(client.generate(model=MODEL, prompt="One, two,", raw=True, stream=True, options=OPTIONS))
    assert "".join(part.response for part in parts) == raw.response


@check
def a_format_is_an_object_of_its_schema() -> None:
    answer = client.chat(format=Forecast.model_json_schema(), **REQUEST | {"options": OPTIONS | {"num_predict": 128}})
    Forecast.model_validate_json(answer.message.content or "")
    asked = {"messages": [{"role": "user", "content": REPEAT}]}
    assert (client.chat(format="json", **REQUEST | asked).message.content or "").lstrip().startswith("{")


@check
def tools_and_their_results_are_taken() -> None:
    client.chat(tools=[get_weather], **REQUEST)  # the client makes the tool from the function
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}}
    turn = [
        *CHAT,
        ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall.model_validate(call)]),
        ollama.Message(role="tool", content=WEATHER, tool_name="get_weather"),
    ]
    answer = client.chat(tools=[TOOL], **REQUEST | {"messages": turn})
    assert answer.message.content or answer.message.tool_calls


@check
def models_are_listed_and_described() -> None:
    for listed in (client.list(), client.ps()):
        assert MODEL in [model.model for model in listed.models]
    shown = client.show(MODEL)
    assert "completion" in (shown.capabilities or [])
    assert (shown.modelinfo or {})["quire.context_length"] > 0


@check
def a_model_is_loaded_without_a_prompt() -> None:
    assert client.generate(model=MODEL, keep_alive="5m").done_reason == "load"


@check
def the_fields_of_requests_are_those_that_the_page_of_parameters_has() -> None:
    types = (
        _types.ChatRequest,
        _types.GenerateRequest,
        _types.Options,
        _types.EmbedRequest,
        _types.EmbeddingsRequest,
    )
    assert_fields("ollama", version("ollama"), {kind.__name__: kind.model_fields for kind in types})


@check
def errors_have_the_status_and_the_field() -> None:
    bad = error_of(ollama.ResponseError, lambda: client.chat(**REQUEST | {"options": {"temperature": 3.0}}))
    assert bad.status_code == 400
    assert "options.temperature" in bad.error
    missing = error_of(ollama.ResponseError, lambda: client.chat(**REQUEST | {"model": "llama3"}))
    assert missing.status_code == 404


if __name__ == "__main__":
    run()

"""Tools and reasoning over the wire in both protocols, with a scripted scheduler; also with OpenAI's client."""

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from answers_with_calls import ANSWERS, ARGUMENTS, CUSTOM_TOOL, Answer, format_of, make_family_directory
from gateway_harness import Harness, rest_of, running_gateway
from gateway_svc import validation
from gateway_svc.answer_constraints import digest_of_form
from gateway_svc.message_formats.formats import TOOL_FORMATS
from gateway_svc.unvalidated_request import UnvalidatedRequest
from official_client import official_client
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedSession, answer_with, stop_end
from tool_families import TOOL_FAMILIES, tool

EOS = 0
CONTEXT_LENGTH = 2_000
TOOLS: list[Any] = [tool("get_weather", city={"type": "string"}, days={"type": "integer"})]
USER: Any = {"role": "user", "content": "Weather?"}
ANSWER = ANSWERS["reasoning, text and call"]
TWO_CALLS = ANSWERS["two calls"]
# With calls of functions alone, the answer of a family that has most.
OF_FAMILIES = {
    answer.family: answer
    for answer in sorted(ANSWERS.values(), key=lambda one: len(one.calls))
    if answer.calls and all(name != CUSTOM_TOOL for name, _ in answer.calls)
}
NAMED = {"idempotency-key": "mine"}
GRPC_TOOLS = [api.Tool(name="get_weather", parameters=json.dumps(TOOLS[0]["function"]["parameters"]))]
CHAT = api.Chat(messages=[api.ChatMessage(role="user", content="Weather?")], tools=GRPC_TOOLS)


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_directory(tmp_path_factory.mktemp("models") / "hermes", "hermes")


@pytest.fixture
async def quire(hermes: Path) -> AsyncIterator[Harness]:
    """A ready gateway for a model with tools, new for each test."""
    async with running_gateway(hermes, CONTEXT_LENGTH) as harness:
        yield harness


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": TOOLS, "max_tokens": 200, **fields}


def events_of(text: str) -> list[Any]:
    rows = [row for row in text.split("\n\n") if "data: {" in row]
    return [json.loads(row.split("data: ")[1]) for row in rows]


def one_by_one(token_ids: list[int]) -> Any:
    """A script that sends tokens in messages of their own."""

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        for offset, token_id in enumerate(token_ids):
            end = stop_end(EOS) if offset == len(token_ids) - 1 else None
            session.tokens(submit.key, [token_id], offset, end=end)

    return script


async def test_a_call_is_a_part_of_the_message(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWER.token_ids, stop_token_id=EOS)
    async with official_client(quire) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS, max_tokens=200)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", ANSWER.text)
    for name in ("reasoning", "reasoning_content"):
        assert choice.message.model_dump()[name] == ANSWER.reasoning
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    assert call.id.startswith("call_")


@pytest.mark.parametrize(("num_characters", "in_thread"), [(1_000, False), (40_000, True)])
async def test_large_tools_do_not_delay_other_calls(
    num_characters: int, in_thread: bool, hermes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recorded(unvalidated: UnvalidatedRequest) -> str:
        threads.append(threading.current_thread())
        return digest_of_form(unvalidated)

    monkeypatch.setattr(validation, "digest_of_form", recorded)
    large = tool("get_weather", city={"type": "string", "description": "x" * num_characters})
    async with running_gateway(hermes, 100_000) as quire:
        quire.scheduler.script = answer_with(ANSWER.token_ids, stop_token_id=EOS)
        response = await quire.http.post("/v1/chat/completions", json=body(tools=[large]))
        assert response.status_code == 200
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]


async def test_reasoning_may_be_left_out_and_counts(quire: Harness) -> None:
    quire.scheduler.script = one_by_one([*ANSWER.token_ids, EOS])
    whole = (await quire.http.post("/v1/chat/completions", json=body(include_reasoning=False))).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], "reasoning_content" in message) == (None, False)
    assert (message["content"], len(message["tool_calls"])) == (ANSWER.text, 1)
    usage = whole["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]

    fields = {"stream": True, "stream_options": {"include_usage": True}}
    shown, hidden = [
        events_of((await quire.http.post("/v1/chat/completions", json=body(**fields, **more))).text)
        for more in ({}, {"include_reasoning": False})
    ]
    assert shown[-1]["usage"] == hidden[-1]["usage"] == usage
    # What would show the reasoning is left out with it.
    fields |= {"include_reasoning": False, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    events = events_of((await quire.http.post("/v1/chat/completions", json=body(**fields))).text)
    choices = [event["choices"][0] for event in events[:-1]]
    assert all(choice["logprobs"] is None and "token_ids" not in choice for choice in choices)
    assert [choice["delta"] for choice in choices][1:] != []
    deltas = [[event["choices"][0]["delta"] for event in events[:-1]] for events in (shown, hidden)]
    assert any("reasoning" in delta for delta in deltas[0])
    kept = [delta for delta in deltas[0] if "reasoning" not in delta]
    assert [delta.keys() for delta in deltas[1]] == [delta.keys() for delta in kept]
    assert [delta.get("content") for delta in deltas[1]] == [delta.get("content") for delta in kept]


async def test_a_message_with_calls_alone_has_no_content(quire: Harness) -> None:
    quire.scheduler.script = answer_with(TWO_CALLS.token_ids, stop_token_id=EOS)
    (choice,) = (await quire.http.post("/v1/chat/completions", json=body())).json()["choices"]
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["finish_reason"] == "tool_calls"
    single = (await quire.http.post("/v1/chat/completions", json=body(parallel_tool_calls=False))).json()["choices"][0]
    assert [call["function"] for call in single["message"]["tool_calls"]] == [
        call["function"] for call in choice["message"]["tool_calls"][:1]
    ]


async def test_calls_stream_as_openai_streams_them(quire: Harness) -> None:
    quire.scheduler.script = one_by_one([*ANSWER.token_ids, EOS])
    response = await quire.http.post("/v1/chat/completions", json=body(stream=True))
    choices = [event["choices"][0] for event in events_of(response.text)]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER.text
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == ANSWER.reasoning
    first, *others = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
    assert first["id"].startswith("call_")
    assert {tuple(call) for call in others} == {("index", "function")}
    arguments = "".join(call["function"]["arguments"] for call in (first, *others))
    assert json.loads(arguments) == json.loads(ARGUMENTS)
    assert len(others) > 3
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_the_official_clients_helper_assembles_a_stream(quire: Harness) -> None:
    quire.scheduler.script = one_by_one([*TWO_CALLS.token_ids, EOS])
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": TOOLS, "max_tokens": 200}
    async with official_client(quire) as client, client.chat.completions.stream(**asked) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [json.loads(ARGUMENTS)] * 2
    assert len({call.id for call in calls}) == 2


async def test_functions_have_one_function_call(quire: Harness) -> None:
    quire.scheduler.script = one_by_one([*TWO_CALLS.token_ids, EOS])
    legacy = {"messages": [USER], "functions": [TOOLS[0]["function"]], "max_tokens": 200}
    (choice,) = (await quire.http.post("/v1/chat/completions", json=legacy)).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"]["name"] == "get_weather"
    response = await quire.http.post("/v1/chat/completions", json={**legacy, "stream": True})
    calls = [
        event["choices"][0]["delta"]["function_call"]
        for event in events_of(response.text)
        if "function_call" in event["choices"][0]["delta"]
    ]
    assert [call.get("name") for call in calls if "name" in call] == ["get_weather"]
    assert "".join(call["arguments"] for call in calls) == choice["message"]["function_call"]["arguments"]


async def test_a_conversation_goes_on_with_the_result(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWER.token_ids, stop_token_id=EOS)
    message = (await quire.http.post("/v1/chat/completions", json=body())).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "20 degrees"}
    quire.scheduler.script = answer_with(ANSWERS["text"].token_ids, stop_token_id=EOS)
    answer = (await quire.http.post("/v1/chat/completions", json=body(messages=[USER, message, result]))).json()
    assert answer["choices"][0]["message"]["content"] == ANSWERS["text"].text
    assert answer["choices"][0]["finish_reason"] == "stop"


class Record:
    """A request that is submitted once, and replayed to later submissions."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._first: scheduler_v1.Submit | None = None

    def play(self, session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        if self._first is None:
            self._first = submit
            one_by_one(self._token_ids)(session, submit)
        elif self._first.body_digest == submit.body_digest:
            tokens = scheduler_v1.Tokens(token_ids=self._token_ids, end=stop_end(EOS))
            session.attached(self._first, tokens)
        else:
            session.fail(submit.key, scheduler_v1.FAILURE_REASON_KEY_IN_USE)


def assembled(events: list[str]) -> tuple[str, str, list[tuple[str, str, str]], list[str]]:
    """Text, reasoning, calls and reasons to finish, as a client makes them of events."""
    text, reasoning, reasons = "", "", []
    calls: dict[int, list[str]] = {}
    for choice in [event["choices"][0] for event in events_of("\n\n".join(events))]:
        delta = choice["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content", "")
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], ["", "", ""])
            call[0] += piece.get("id", "")
            call[1] += piece["function"].get("name", "")
            call[2] += piece["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, reasoning, [(one[0], one[1], one[2]) for one in calls.values()], reasons


def test_every_format_has_an_answer_that_is_resumed() -> None:
    found = [format_of(family).tools for family in OF_FAMILIES]
    assert {one.name for one in found if one is not None} == TOOL_FORMATS.keys()


@pytest.mark.parametrize("answer", OF_FAMILIES.values(), ids=OF_FAMILIES)
async def test_a_stream_is_resumed_within_the_arguments_on_another_gateway(answer: Answer, tmp_path: Path) -> None:
    directory = make_family_directory(tmp_path / "model", answer.family)
    record = Record([*answer.token_ids, EOS])
    async with running_gateway(directory, CONTEXT_LENGTH) as one, running_gateway(directory, CONTEXT_LENGTH) as other:
        one.scheduler.script = other.scheduler.script = record.play
        response = await one.http.post("/v1/chat/completions", json=body(stream=True), headers=NAMED)
        events = [event for event in response.text.split("\n\n") if event]
        text, reasoning, calls, reasons = assembled(events)
        assert (text, reasoning, reasons) == (answer.text, answer.reasoning, ["tool_calls"])
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
            (name, json.loads(arguments)) for name, arguments in answer.calls
        ]
        # At a third of the places: test_sequence_turn.py of the gateway checks each.
        for position, event in [*enumerate(events[:-1], 1)][::3]:
            last = event.split("\n")[0].removeprefix("id: ")
            headers = {**NAMED, "last-event-id": last}
            resumed = await other.http.post("/v1/chat/completions", json=body(stream=True), headers=headers)
            rest = [each for each in resumed.text.split("\n\n") if each]
            assert assembled(events[:position] + rest) == assembled(events)


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}], ids=["shown", "hidden"])
async def test_the_usage_of_a_resumed_stream_has_all_reasoning(hermes: Path, more: dict[str, Any]) -> None:
    record = Record([*ANSWER.token_ids, EOS])
    fields = body(stream=True, stream_options={"include_usage": True}, **more)
    async with running_gateway(hermes, CONTEXT_LENGTH) as one, running_gateway(hermes, CONTEXT_LENGTH) as other:
        one.scheduler.script = other.scheduler.script = record.play
        response = await one.http.post("/v1/chat/completions", json=fields, headers=NAMED)
        usage = events_of(response.text)[-1]["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
        for event in [each for each in response.text.split("\n\n") if each][:-2]:
            headers = {**NAMED, "last-event-id": event.split("\n")[0].removeprefix("id: ")}
            resumed = await other.http.post("/v1/chat/completions", json=fields, headers=headers)
            assert events_of(resumed.text)[-1]["usage"] == usage


async def test_chunks_and_completions_have_calls_over_grpc(quire: Harness) -> None:
    quire.scheduler.script = one_by_one([*ANSWER.token_ids, EOS])
    generation = api.Generation(chat=CHAT, request_id="mine")
    response = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    assert 0 < response.usage.reasoning_tokens < response.usage.completion_tokens
    whole = response.completions[0]
    assert (whole.text, whole.reasoning) == (ANSWER.text, ANSWER.reasoning)
    assert whole.finish.reason == api.FINISH_REASON_TOOL_CALLS
    assert whole.finish.token_id == EOS
    messages = await rest_of(quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation)))
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
    assert [(piece.id, piece.name) for piece in pieces if piece.id] == [(whole.tool_calls[0].id, "get_weather")]
    assert "".join(piece.arguments for piece in pieces) == whole.tool_calls[0].arguments
    assert "".join(chunk.reasoning for chunk in chunks) == ANSWER.reasoning


async def test_tokenize_takes_the_chat_of_a_request(quire: Harness) -> None:
    quire.scheduler.script = answer_with(ANSWERS["text"].token_ids, stop_token_id=EOS)
    await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(chat=CHAT)))
    (submit,) = quire.scheduler.all("submit")
    response = await quire.stub.Tokenize(api.TokenizeRequest(chat=CHAT))
    assert response.token_ids == submit.prompt_token_ids
    without = await quire.stub.Tokenize(api.TokenizeRequest(chat=api.Chat(messages=CHAT.messages)))
    assert len(without.token_ids) < len(response.token_ids)


# Each is (fields over HTTP, fields over gRPC, what the template makes of them).
_WITHOUT_THOUGHTS = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
_VARIABLES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "<|im_start|>assistant\n"),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}, "<|im_start|>assistant\n"),
    ({"reasoning_effort": "none"}, {"reasoning_effort": "none"}, _WITHOUT_THOUGHTS),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"template_kwargs": '{"enable_thinking": false}'},
        _WITHOUT_THOUGHTS,
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
        {"template_kwargs": '{"enable_thinking": true}', "reasoning_effort": "none"},
        "<|im_start|>assistant\n",
    ),
]


@pytest.mark.parametrize(("over_http", "over_grpc", "expected"), _VARIABLES)
async def test_an_effort_and_the_variables_of_a_template_change_the_prompt_that_is_sent(
    quire: Harness, over_http: dict[str, Any], over_grpc: dict[str, Any], expected: str
) -> None:
    quire.scheduler.script = answer_with(ANSWERS["text"].token_ids, stop_token_id=EOS)
    response = await quire.http.post("/v1/chat/completions", json={"messages": [USER], **over_http})
    assert response.status_code == 200, response.text
    body = {"input": [USER], **over_http}
    if "reasoning_effort" in body:
        body["reasoning"] = {"effort": body.pop("reasoning_effort")}
    response = await quire.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    chat = api.Chat(messages=CHAT.messages, **over_grpc)
    await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(chat=chat)))
    prompts = [list(submit.prompt_token_ids) for submit in quire.scheduler.all("submit")]
    prompt = f"<|im_start|>user\nWeather?<|im_end|>\n{expected}"
    expected_ids = TOOL_FAMILIES["hermes"].tokenizer.encode(prompt, add_special_tokens=False).ids
    assert prompts == [expected_ids] * 3


async def test_a_gateway_without_the_format_of_an_answer_cannot_continue_it(quire: Harness) -> None:
    """One of an earlier release, where a later one has another format."""

    def attach(session: ScriptedSession, attach: scheduler_v1.Attach) -> None:
        submit = scheduler_v1.Submit(key=attach.key, n=1, detachable=True)
        submit.render_options.request_id, submit.render_options.model = "mine", "tiny"
        submit.render_options.n = 1
        submit.render_options.turn.tools = "of_tomorrow"
        session.attached(submit, scheduler_v1.Tokens(token_ids=[5]))

    quire.scheduler.attach_script = attach
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await rest_of(quire.stub.Resume(api.ResumeRequest(request_id="mine")))
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE

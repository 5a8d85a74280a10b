"""OpenAI's Responses API, used by the official client, with a scripted scheduler."""

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from grpc_health.v1 import health_pb2
from openai.types.responses import ResponseOutputMessage

from gateway_harness import MODEL, Harness, encoded, gateway_at, running_gateway, scheduler_model
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.responses.events import ResponseEvents
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.output import Chunk, Usage
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from responses_api import events_of, prompt_of, record, texts_of
from scripted_scheduler import ScriptedScheduler, answer_with, serving, stop_end
from svc_common.protocols import ProtocolRange
from tiny_model import EOS

HELLO = "hello there"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def quire(shared: Harness) -> Harness:
    """The module's gateway."""
    return shared


async def test_a_response_has_its_output_and_what_was_asked(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS, cached_tokens=2)
    returned: dict[str, Any] = {
        "metadata": {"a": "b"},
        "max_tool_calls": 3,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    response = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", temperature=0.5, max_output_tokens=50, **returned
    )
    assert (response.output_text, response.status, response.object) == (HELLO, "completed", "response")
    assert (response.instructions, response.temperature) == ("Be brief.", 0.5)
    assert {name: response.to_dict()[name] for name in returned} == returned
    assert (response.max_output_tokens, response.tool_choice, response.store) == (50, "auto", True)
    usage = response.usage
    assert usage is not None
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (len(encoded(HELLO)) + 1, 2)
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "completed")
    submit = await quire.scheduler.next("submit")
    assert (submit.detachable, submit.is_background, submit.render_options.request_id) == (False, False, response.id)
    assert "Be brief." in prompt_of(submit)


async def test_a_body_is_not_kept_while_its_response_is_made(quire: Harness) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    call = asyncio.create_task(quire.http.post("/v1/responses", json={"input": "Hi", "store": False}))
    await quire.scheduler.next("submit")
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is ResponsesBody]
    call.cancel()
    await asyncio.wait([call])


async def test_a_response_that_is_not_stored_leaves_nothing(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    response = await client.responses.create(model=MODEL, input="Hi", store=False)
    assert response.output_text == HELLO
    submit = await quire.scheduler.next("submit")
    assert (submit.retention.is_unrecorded, submit.detachable, submit.attachment) == (True, False, b"")


async def test_the_end_of_text_ends_a_response_unless_it_is_ignored(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    for is_ignored in (False, True):
        await client.responses.create(model=MODEL, input="Hi", store=False, extra_body={"ignore_eos": is_ignored})
        submit = await quire.scheduler.next("submit")
        assert (EOS in submit.stop_token_ids) is not is_ignored


async def test_fields_of_vllm_are_sent_on(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    fields = {"logit_bias": {"5": 2}, "bad_words": ["world"], "min_tokens": 2, "stop_token_ids": [7]}
    response = await client.responses.create(model=MODEL, input="Hi", extra_body=fields)
    assert response.output_text == HELLO
    submit = await quire.scheduler.next("submit")
    assert dict(submit.sampling.logit_bias) == {5: 2.0}
    assert list(submit.sampling.bad_words[0].token_ids) == encoded("world")
    assert (submit.sampling.min_tokens, 7 in submit.stop_token_ids) == (2, True)
    for name, wrong in {"logit_bias": {"9999999": 1}, "min_tokens": 10**6, "stop_token_ids": [-1]}.items():
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(model=MODEL, input="Hi", extra_body={name: wrong})
        assert str(raised.value.param).partition("[")[0] == name


async def test_the_events_of_a_stream_build_the_response(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert (await quire.scheduler.next("submit")).detachable
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if "delta" in event) == HELLO
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == HELLO
    assert events[0]["response"]["status"] == "in_progress"


async def test_a_stream_continues_after_any_of_its_events(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    response_id = events[0]["response"]["id"]
    submit = await quire.scheduler.next("submit")
    half = record(submit, "hello", is_over=False)
    rest = scheduler_v1.Tokens(token_ids=[*encoded(HELLO), EOS], cached_tokens=0, end=stop_end(EOS))
    for found in (record(submit, HELLO), half):
        quire.scheduler.records[submit.key] = found
        quire.scheduler.attach_script = lambda session, attach: session.attached(submit, rest)
        for after in range(-1, len(events), 3):
            more: Any = {"starting_after": after} if after >= 0 else {}
            again = await events_of(await client.responses.retrieve(response_id, stream=True, **more))
            assert again == events[after + 1 :]


async def test_a_background_response_is_answered_before_it_runs(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    submit = await quire.scheduler.next("submit")
    assert (submit.detachable, submit.is_background) == (True, True)
    await quire.scheduler.next("detach")
    quire.scheduler.records[submit.key] = record(submit, "", is_over=False)
    assert (await client.responses.retrieve(response.id)).status == "queued"
    quire.scheduler.records[submit.key] = record(submit, "hello", is_over=False)
    running = await client.responses.retrieve(response.id)
    assert (running.status, texts_of(running)) == ("in_progress", ["hello"])
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    done = await client.responses.retrieve(response.id)
    assert (done.status, done.output_text, done.created_at) == ("completed", HELLO, response.created_at)
    assert (response.completed_at, running.completed_at, done.completed_at) == (None, None, 2_000_000_000)
    assert "completed_at" in response.to_dict()


async def test_a_long_response_is_replayed_beside_others(
    quire: Harness, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[bytes] = []
    threads: set[str] = set()
    send, load = HttpExchange.send_events, StoredResponse.from_bytes

    async def send_events(exchange: HttpExchange, data: bytes) -> None:
        parts.append(data)
        await send(exchange, data)

    def from_bytes(data: bytes) -> StoredResponse | None:
        threads.add(threading.current_thread().name)
        return load(data)

    monkeypatch.setattr(HttpExchange, "send_events", send_events)
    monkeypatch.setattr(StoredResponse, "from_bytes", from_bytes)
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    submit = await quire.scheduler.next("submit")
    text = "x" * 1000
    quire.scheduler.records[submit.key] = record(submit, text)
    assert (await client.responses.retrieve(response.id)).output_text == text
    events = await events_of(await client.responses.retrieve(response.id, stream=True))
    assert len(events) == 1000 + 9
    assert len(parts) > 4
    assert threading.current_thread().name not in threads
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


async def test_a_long_response_that_runs_is_streamed_again_beside_others(
    quire: Harness, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    on_loop: list[int] = []
    send, add = HttpExchange.send_events, ResponseEvents.add

    async def send_events(exchange: HttpExchange, data: bytes) -> None:
        parts.append(data.count(b"data: "))
        await send(exchange, data)

    def recorded(events: ResponseEvents, chunk: Chunk, usage: Usage) -> Any:
        if threading.current_thread() is threading.main_thread():
            on_loop.append(chunk.offset)
        return add(events, chunk, usage)

    monkeypatch.setattr(HttpExchange, "send_events", send_events)
    monkeypatch.setattr(ResponseEvents, "add", recorded)
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    submit = await quire.scheduler.next("submit")
    tokens = encoded("x" * 1000)
    quire.scheduler.records[submit.key] = record(submit, "x" * 1000, is_over=False)

    def attach_script(session: Any, attach: Any) -> None:
        session.attached(submit, scheduler_v1.Tokens(token_ids=tokens, cached_tokens=0))
        session.tokens(submit.key, [EOS], len(tokens), end=stop_end(EOS))

    quire.scheduler.attach_script = attach_script
    events = await events_of(await client.responses.retrieve(response.id, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(1000 + 9))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "x" * 1000
    assert max(parts) <= 260
    assert all(offset >= 1000 for offset in on_loop), "only the end may be made by the event loop"


@pytest.mark.parametrize(("num_tokens", "in_thread"), [(15, False), (60, True)])
async def test_a_response_is_rendered_again_beside_others_where_that_takes_more_than_a_millisecond(
    num_tokens: int,
    in_thread: bool,
    quire: Harness,
    client: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[threading.Thread] = set()
    add = ResponseEvents.add

    def recorded(events: ResponseEvents, chunk: Chunk, usage: Usage) -> Any:
        threads.add(threading.current_thread())
        return add(events, chunk, usage)

    monkeypatch.setattr(ResponseEvents, "add", recorded)
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, "x" * num_tokens)
    assert texts_of(await client.responses.retrieve(response.id)) == ["x" * num_tokens]
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]


async def test_a_response_that_reached_its_length_is_incomplete(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO))
    response = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


async def test_text_may_have_log_probabilities(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    response = await client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    [message] = response.output
    logprobs = message.to_dict()["content"][0]["logprobs"]  # type: ignore[index]
    assert "".join(one["token"] for one in logprobs) == HELLO
    assert {len(one["top_logprobs"]) for one in logprobs} == {2}


async def test_a_text_format_is_a_constraint(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded("{}"), stop_token_id=EOS)
    form: Any = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    response = await client.responses.create(model=MODEL, input="Hi", text={"format": form})
    assert (await quire.scheduler.next("submit")).sampling.grammar
    assert response.to_dict()["text"]["format"]["name"] == "any"  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"background": True, "store": False}, "background", "invalid_field"),
        ({"truncation": "some"}, "truncation", "invalid_field"),
        ({"conversation": "conv_1"}, "conversation", "feature_unsupported"),
        ({"prompt": {"id": "p"}}, "prompt", "feature_unsupported"),
        ({"temperature": 3}, "temperature", "invalid_field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_field"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "request_unknown"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "feature_unsupported"),
        ({"input": []}, "input", "invalid_field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "feature_unsupported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", None),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[0].call_id",
            "invalid_field",
        ),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_field"),
        ({"metadata": {"a": "\ud800"}}, None, "malformed_message"),
    ],
)
async def test_what_is_not_served_is_named(
    shared: Harness, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    body = json.dumps({"model": MODEL, "input": "Hi"} | change)
    answer = await shared.http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert shared.scheduler.all("submit") == []


@pytest.mark.parametrize(
    "query",
    ["starting_after=1", "stream=yes", "stream=true&starting_after=-1", "stream=true&starting_after=1e3"],
)
async def test_parameters_of_a_retrieval_are_checked(shared: Harness, query: str) -> None:
    answer = await shared.http.get(f"/v1/responses/resp_{'0' * 48}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


async def test_a_stream_that_loses_its_scheduler_ends_with_an_error_at_the_latest_event(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    def script(session: Any, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, encoded("hello"), 0)
        session.fail(submit.key, scheduler_v1.FAILURE_REASON_UNAVAILABLE)

    quire.scheduler.script = script
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    assert [event["type"] for event in events][-2:] == ["response.output_text.delta", "error"]
    assert events[-1]["sequence_number"] == events[-2]["sequence_number"]
    # Also where the client has more events than were replayed so far.
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, "", is_over=False)

    def attach_script(session: Any, attach: Any) -> None:
        session.attached(submit, scheduler_v1.Tokens())
        session.fail(submit.key, scheduler_v1.FAILURE_REASON_UNAVAILABLE)

    quire.scheduler.attach_script = attach_script
    after: Any = {"starting_after": 7}
    [error] = await events_of(await client.responses.retrieve(events[0]["response"]["id"], stream=True, **after))
    assert (error["type"], error["sequence_number"]) == ("error", 7)


async def test_the_deadline_of_a_repeated_call_does_not_fail_the_response(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    headers = {"Idempotency-Key": "repeated"}
    first = await client.responses.create(model=MODEL, input="Hi", background=True, extra_headers=headers)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, "hello", is_over=False)

    def script(session: Any, repeated: scheduler_v1.Submit) -> None:
        session.attached(submit, scheduler_v1.Tokens(token_ids=encoded("hello"), cached_tokens=0))

    quire.scheduler.script = script
    headers["x-request-timeout"] = "2"
    events = await events_of(
        await client.responses.create(model=MODEL, input="Hi", background=True, stream=True, extra_headers=headers)
    )
    assert [event["type"] for event in events][-2:] == ["response.output_text.delta", "error"]
    assert events[-1]["code"] == "deadline_exceeded"
    assert events[0]["response"]["id"] == first.id


@pytest.mark.parametrize("headers", [{}, {"x-request-timeout": "600"}], ids=["no deadline", "a later deadline"])
async def test_the_deadline_of_the_response_fails_the_streams_of_calls_that_join_it(
    headers: dict[str, str], quire: Harness, client: openai.AsyncOpenAI
) -> None:
    name = {"Idempotency-Key": "response-with-a-deadline"}
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    first = await client.responses.create(
        model=MODEL, input="Hi", background=True, extra_headers={"x-request-timeout": "60", **name}
    )
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, "hello", is_over=False)

    def end_late(session: Any, _: Any) -> None:
        session.attached(submit, scheduler_v1.Tokens(token_ids=encoded("hello"), cached_tokens=0))
        session.fail(submit.key, scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED)

    quire.scheduler.script = quire.scheduler.attach_script = end_late
    repeated = await client.responses.create(
        model=MODEL, input="Hi", background=True, stream=True, extra_headers={**headers, **name}
    )
    retrieved = await client.responses.retrieve(first.id, stream=True)
    for stream in (repeated, retrieved):
        events = await events_of(stream)
        assert [event["type"] for event in events][-2:] == ["response.output_text.delta", "response.failed"]


async def test_a_scheduler_of_the_release_before_runs_only_what_is_not_stored(model_directory: Path) -> None:
    before = ScriptedScheduler(scheduler_model(model_directory), protocols=ProtocolRange(1, 2))
    before.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    async with serving(before), gateway_at(before, model_directory, [before.address]) as old:
        await old.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
        stored = await old.http.post("/v1/responses", json={"input": "Hi"})
        assert (stored.status_code, stored.json()["error"]["code"]) == (503, "capacity_exhausted")
        found = await old.http.get(f"/v1/responses/resp_{'0' * 48}")
        assert found.status_code == 503
        answer = await old.http.post("/v1/responses", json={"input": "Hi", "store": False})
        assert answer.json()["output"][0]["content"][0]["text"] == HELLO
    assert {command.WhichOneof("command") for command in before.commands} == {"hello", "submit"}


async def test_a_response_is_its_tenants_and_a_key_may_allow_no_records(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\n'
        '[[keys]]\nkey = "the-own-key-of-bob"\ntenant = "bob"\nretention = "none"\n'
    )
    alice, bob = ({"Authorization": f"Bearer the-own-key-of-{name}"} for name in ("alice", "bob"))
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
        created = (await quire.http.post("/v1/responses", json={"input": "Hi"}, headers=alice)).json()
        submit = await quire.scheduler.next("submit")
        quire.scheduler.records[submit.key] = record(submit, HELLO)
        address = f"/v1/responses/{created['id']}"
        assert (await quire.http.get(address, headers=alice)).json()["output"] == created["output"]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert (await quire.http.request(method, address + path, headers=bob)).status_code == 404
            assert (await quire.http.request(method, address + path)).status_code == 401
        body = {"input": "Hi", "previous_response_id": created["id"]}
        assert (await quire.http.post("/v1/responses", json=body, headers=bob)).status_code == 404
        unrecorded = (await quire.http.post("/v1/responses", json={"input": "Hi"}, headers=bob)).json()
        submit = await quire.scheduler.next("submit")
        assert (unrecorded["store"], submit.attachment, submit.retention.is_unrecorded) == (False, b"", True)
        body = {"input": "Hi", "background": True}
        error = (await quire.http.post("/v1/responses", json=body, headers=bob)).json()["error"]
        assert (error["param"], error["code"]) == ("background", "invalid_field")

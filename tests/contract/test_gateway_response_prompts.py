"""Responses that end at a text, and the number of tokens of a response's prompt, with a scripted scheduler."""

import threading
from typing import Any

import openai
import pytest

from gateway_harness import MODEL, Harness, encoded
from gateway_svc.http_api.responses import request
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from responses_api import events_of, record, texts_of
from scripted_scheduler import answer_with, cut_end, length_end
from tiny_model import EOS

HELLO = "hello there"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def quire(shared: Harness) -> Harness:
    """The module's gateway."""
    return shared


@pytest.mark.parametrize(("stop", "is_included", "text"), [("th", False, "hello "), (["x", "th"], True, "hello th")])
async def test_a_text_ends_a_response(
    quire: Harness, client: openai.AsyncOpenAI, stop: Any, is_included: bool, text: str
) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    fields = {"stop": stop, "include_stop_str_in_output": is_included}
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True, extra_body=fields)
    events = await events_of(stream)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    finish = await quire.scheduler.next("finish")
    submit = await quire.scheduler.next("submit")
    assert events[-1]["response"]["usage"]["output_tokens"] == finish.num_tokens < len(encoded(HELLO))
    cut = record(submit, "")
    tokens = encoded(HELLO)[: finish.num_tokens]
    cut.attached.sequences[0].CopyFrom(scheduler_v1.Tokens(token_ids=tokens, cached_tokens=0, end=cut_end()))
    quire.scheduler.records[submit.key] = cut
    after: Any = {"starting_after": 3}
    again = await client.responses.retrieve(events[0]["response"]["id"], stream=True, **after)
    assert await events_of(again) == events[4:]


async def test_special_tokens_may_be_a_part_of_the_text(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    for fields, kept in (({}, False), ({"skip_special_tokens": False}, True)):
        await client.responses.create(model=MODEL, input="Hi", store=False, extra_body=fields)
        submit = await quire.scheduler.next("submit")
        assert submit.render_options.keep_special_tokens is kept


@pytest.mark.parametrize("ending", ["runs", "length", "failed"])
async def test_a_background_response_ends_at_a_text_when_it_is_looked_up(
    quire: Harness, client: openai.AsyncOpenAI, ending: str
) -> None:
    """While no client reads it, no gateway searches its text."""
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    stop: dict[str, Any] = {"stop": " th"}
    response = await client.responses.create(model=MODEL, input="Hi", background=True, extra_body=stop)
    submit = await quire.scheduler.next("submit")
    failed = scheduler_v1.Failed(reason=scheduler_v1.FAILURE_REASON_UNAVAILABLE)
    more: dict[str, Any] = {"failed": failed} if ending == "failed" else {}
    found = record(submit, HELLO, is_over=ending != "runs", **more)
    if ending == "length":
        found.attached.sequences[0].end.CopyFrom(length_end())
    quire.scheduler.records[submit.key] = found
    done = await client.responses.retrieve(response.id)
    assert (done.status, texts_of(done)) == ("completed", ["hello"])
    assert done.usage is not None
    # It is sent on another stream than the look-up.
    finishes = [await quire.scheduler.next("finish")] if ending == "runs" else []
    assert quire.scheduler.all("finish") == finishes
    for finish in finishes:
        assert (finish.key, finish.submission_id) == (submit.key, submit.submission_id)
        assert finish.num_tokens == done.usage.output_tokens == len(encoded("hello th"))


async def test_a_text_that_ends_nothing_is_named(quire: Harness) -> None:
    for stop, param in (("", "stop"), (["a", ""], "stop[1]"), (["a"] * 65, "stop")):
        refused = await quire.http.post("/v1/responses", json={"input": "Hi", "stop": stop})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_tokens_of_a_prompt_are_counted(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    first = await client.responses.create(model=MODEL, input="First?", instructions="Be brief.")
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    prompts: list[dict[str, Any]] = [
        {"input": "Hi"},
        {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief."},
        {"input": "Second?", "previous_response_id": first.id},
        {"input": "Hi", "truncation": "auto"},
    ]
    for prompt in prompts:
        num_submits = len(quire.scheduler.all("submit"))
        count = await client.responses.input_tokens.count(model=MODEL, **prompt)
        assert len(quire.scheduler.all("submit")) == num_submits
        answered = await client.responses.create(model=MODEL, store=False, **prompt)
        assert answered.usage is not None
        assert (count.object, count.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
    with_tools = await client.responses.input_tokens.count(model=MODEL, tools=[WEATHER], **prompts[0])
    assert with_tools.input_tokens > 100
    alone = await client.responses.input_tokens.count(model=MODEL, previous_response_id=first.id)
    assert alone.input_tokens < (await client.responses.input_tokens.count(model=MODEL, **prompts[2])).input_tokens


async def test_a_prompt_beyond_the_context_is_counted_and_what_is_left_of_it(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    items: Any = [{"role": "user", "content": "a" * 200} for _ in range(8)]
    (model,) = (await quire.http.get("/v1/models")).json()["data"]
    count = await client.responses.input_tokens.count(model=MODEL, input=items)
    assert count.input_tokens > model["max_model_len"]
    left = await client.responses.input_tokens.count(model=MODEL, input=items, truncation="auto")
    assert 200 < left.input_tokens < model["max_model_len"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("length", ["many items", "a long stored item"])
async def test_a_long_conversation_is_converted_once_in_a_thread(
    quire: Harness, monkeypatch: pytest.MonkeyPatch, path: str, length: str
) -> None:
    conversation: dict[str, Any] = {"input": [{"role": "user", "content": "a" * 20} for _ in range(200)]}
    if length == "a long stored item":
        quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
        items = [{"role": "user", "content": "a" * 40_000}, {"role": "user", "content": "Hi"}]
        first = await quire.http.post("/v1/responses", json={"input": items, "truncation": "auto"})
        submit = quire.scheduler.all("submit")[-1]
        quire.scheduler.records[submit.key] = record(submit, HELLO)
        conversation = {"input": "And?", "previous_response_id": first.json()["id"]}
    threads: dict[str, list[threading.Thread]] = {"input_items": [], "chat_messages": [], "_tool_choice": []}

    def record_threads(name: str) -> None:
        real = getattr(request, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            threads[name].append(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(request, name, recorded)

    for name in threads:
        record_threads(name)
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    limit = {"max_output_tokens": 20} if path == "/v1/responses" else {}
    response = await quire.http.post(path, json=conversation | {"truncation": "auto"} | limit)
    assert response.status_code == 200
    for used in threads.values():
        (thread,) = used  # although several truncations of it are tried
        assert thread is not threading.main_thread()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 1}, "input"),
        ({"input": "Hi", "personality": "friendly"}, "personality"),
        ({"input": "Hi", "model": "other"}, "model"),
        ({"input": "Hi", "previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
async def test_what_is_not_counted_is_named(quire: Harness, body: dict[str, Any], param: str) -> None:
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        refused = await quire.http.post(path, json=body)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == param

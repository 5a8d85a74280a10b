"""Conversations, cancelled, deleted and repeated responses, with a scripted scheduler."""

import threading
from typing import Any

import openai
import pytest

from gateway_harness import MODEL, Harness, encoded
from gateway_svc.http_api import events
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from responses_api import events_of, prompt_of, record, texts_of
from scripted_scheduler import answer_with, stop_end
from tiny_model import EOS

HELLO = "hello there"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def quire(shared: Harness) -> Harness:
    """The module's gateway."""
    return shared


async def test_a_conversation_continues_with_the_items_of_the_previous_response(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    first = await client.responses.create(model=MODEL, input="First?", instructions="Be brief.")
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    second = await client.responses.create(model=MODEL, input="Second?", previous_response_id=first.id)
    submit = await quire.scheduler.next("submit")
    prompt = prompt_of(submit)
    places = [prompt.index(text) for text in ("First?", HELLO, "Second?")]
    assert places == sorted(places)
    assert "Be brief." not in prompt
    assert second.previous_response_id == first.id
    quire.scheduler.records[submit.key] = record(submit, "bye")
    listed = await client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.to_dict()["content"][0]["text"] for item in listed.data] == ["First?", HELLO]  # type: ignore[index]
    assert listed.has_more
    items = [item.to_dict() async for item in client.responses.input_items.list(second.id, limit=1)]
    assert [item["content"][0]["text"] for item in items] == ["Second?", HELLO, "First?"]  # type: ignore[index]


@pytest.mark.parametrize(("num_characters", "in_thread"), [(10, False), (2_000, True)])
async def test_items_are_rendered_beside_others_where_that_takes_more_than_a_millisecond(
    num_characters: int,
    in_thread: bool,
    quire: Harness,
    client: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    chat: Any = [{"role": "user", "content": "x" * num_characters}] * 50
    response = await client.responses.create(model=MODEL, input=[*chat, chat[0] | {"content": "Hi"}], truncation="auto")
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    threads: set[threading.Thread] = set()
    encode = events._ENCODER.encode

    def recorded(body: Any) -> str:
        threads.add(threading.current_thread())
        return encode(body)

    monkeypatch.setattr(events._ENCODER, "encode", recorded)
    assert len((await client.responses.input_items.list(response.id, limit=100)).data) == 51
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]


async def test_the_oldest_messages_are_left_out_where_the_context_is_too_short(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    chat: Any = [{"role": "user", "content": f"{number}: {'x' * 60}"} for number in range(6)]
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(model=MODEL, input=chat)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    response = await client.responses.create(model=MODEL, input=chat, instructions="Be brief.", truncation="auto")
    assert response.truncation == "auto"
    submit = await quire.scheduler.next("submit")
    prompt = prompt_of(submit)
    assert [number for number in range(6) if f"{number}: x" in prompt] == [3, 4, 5]
    assert "Be brief." in prompt
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    assert len([item async for item in client.responses.input_items.list(response.id)]) == 6
    await client.responses.create(model=MODEL, input=chat[4:], max_output_tokens=150, truncation="auto")
    submit = await quire.scheduler.next("submit")
    assert ("4: x" in prompt_of(submit), submit.max_tokens) == (False, 150)
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(model=MODEL, input="x" * 300, truncation="auto")
    assert error.value.code == "context_length_exceeded"


async def test_a_response_that_runs_or_failed_is_not_continued(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    first = await client.responses.create(model=MODEL, input="Hi", background=True)
    submit = await quire.scheduler.next("submit")
    failed = scheduler_v1.Failed(reason=scheduler_v1.FAILURE_REASON_CANCELLED)
    for found in (record(submit, "hello", is_over=False), record(submit, "hello", failed=failed)):
        quire.scheduler.records[submit.key] = found
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model=MODEL, input="Second?", previous_response_id=first.id)
        assert error.value.param == "previous_response_id"


async def test_a_response_is_cancelled_and_stays_so(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    first = await client.responses.create(model=MODEL, input="Hi", background=True)
    submit = await quire.scheduler.next("submit")
    failed = scheduler_v1.Failed(reason=scheduler_v1.FAILURE_REASON_CANCELLED)
    quire.scheduler.records[submit.key] = record(submit, "hello", failed=failed)
    for _ in range(2):
        cancelled = await client.responses.cancel(first.id)
        assert (cancelled.status, texts_of(cancelled)) == ("cancelled", ["hello"])
        assert cancelled.error is None
    assert quire.scheduler.all("cancel") == []  # it had ended
    quire.scheduler.records[submit.key] = record(submit, "hello", is_over=False)
    await client.responses.cancel(first.id)
    assert (await quire.scheduler.next("cancel")).key == submit.key


async def test_a_response_that_was_answered_at_once_is_not_cancelled_afterwards(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    response = await client.responses.create(model=MODEL, input="Hi")
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel(response.id)


async def test_a_stream_of_a_response_that_fails_ends_with_the_reason(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    def script(session: Any, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, encoded("hello"), 0)
        session.fail(submit.key, scheduler_v1.FAILURE_REASON_QUARANTINED)

    quire.scheduler.script = script
    events = await events_of(await client.responses.create(model=MODEL, input="Hi", stream=True))
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "workers died" in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["status"] == "incomplete"


async def test_a_deleted_response_is_unknown(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    response = await client.responses.create(model=MODEL, input="Hi")
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    await client.responses.delete(response.id)
    for call in (
        client.responses.retrieve(response.id),
        client.responses.delete(response.id),
        client.responses.cancel(response.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            await call
        assert (error.value.param, error.value.code) == ("response_id", "request_unknown")
        assert f"Response with id '{response.id}' not found." in error.value.message


async def test_a_request_that_is_no_response_is_unknown(quire: Harness, client: openai.AsyncOpenAI) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    name = "resp_" + "0" * 48
    headers = {"Idempotency-Key": name}
    await client.completions.create(model=MODEL, prompt="Hi", extra_headers=headers)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    for response_id in (name, "mine", "resp_x"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)


async def test_a_call_with_the_idempotency_key_of_another_gets_its_response(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    quire.scheduler.script = answer_with(encoded(HELLO), stop_token_id=EOS)
    headers = {"Idempotency-Key": "mine"}
    first = await client.responses.create(model=MODEL, input="Hi", metadata={"n": "1"}, extra_headers=headers)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    tokens = scheduler_v1.Tokens(token_ids=[*encoded(HELLO), EOS], end=stop_end(EOS))
    quire.scheduler.script = lambda session, repeated: session.attached(submit, tokens)
    second = await client.responses.create(model=MODEL, input="Hi", extra_headers=headers)
    assert (second.id, second.metadata, second.output_text) == (first.id, {"n": "1"}, HELLO)
    again = await quire.scheduler.next("submit")
    assert (again.key, again.body_digest) == (submit.key, submit.body_digest)
    assert submit.detachable


async def test_a_repeated_background_call_gets_the_response_as_it_is(
    quire: Harness, client: openai.AsyncOpenAI
) -> None:
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    headers = {"Idempotency-Key": "in-the-background"}
    first = await client.responses.create(model=MODEL, input="Hi", background=True, extra_headers=headers)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.records[submit.key] = record(submit, HELLO)
    tokens = scheduler_v1.Tokens(token_ids=[*encoded(HELLO), EOS], end=stop_end(EOS))
    quire.scheduler.script = lambda session, repeated: session.attached(submit, tokens)
    second = await client.responses.create(model=MODEL, input="Hi", background=True, extra_headers=headers)
    assert (second.id, second.status, second.output_text) == (first.id, "completed", HELLO)

"""The session with a scheduler: real streams, to a scheduler that does as the test says."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from gateway_svc import session as session_module
from gateway_svc.fields import Field
from gateway_svc.generation import ModelFacts, OnLeave
from gateway_svc.session import SchedulerSession
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, serving
from svc_common.errors import QuireError, Reason

FINGERPRINT = b"\x01" * 32
MODEL = scheduler_v1.Model(name="tiny", tokenizer_fingerprint=FINGERPRINT, context_length=64, vocab_size=100)
FACTS = ModelFacts("tiny", 64, 100)
TOLD_WHY = {
    Reason.INVALID_FIELD,
    Reason.CONTEXT_LENGTH_EXCEEDED,
    Reason.TENANT_QUOTA_EXCEEDED,
    Reason.DEADLINE_TOO_SHORT,
}


class Request:
    """Notes what a request is told, as (what, value)."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def spell(self, which: Field) -> str:
        return f"my {which}"

    def on_accepted(self) -> None:
        self.told.put_nowait(("accepted", None))

    def on_tokens(self, tokens: scheduler_v1.Tokens) -> None:
        if tokens.index == 99:
            raise RuntimeError("secret")
        self.told.put_nowait(("tokens", list(tokens.token_ids)))

    def on_failed(self, error: QuireError) -> None:
        self.told.put_nowait(("failed", error))

    async def next(self) -> tuple[str, Any]:
        async with asyncio.timeout(10):
            return await self.told.get()

    async def failure(self) -> QuireError:
        what, error = await self.next()
        assert what == "failed"
        assert isinstance(error, QuireError)
        return error


class Client:
    """A session that is kept up, and a way to wait for its readiness."""

    def __init__(self, *addresses: str) -> None:
        self._changed = asyncio.Condition()
        self.session = SchedulerSession(addresses, "tiny", FINGERPRINT, self._on_change)
        self._notes: set[asyncio.Task[None]] = set()

    def _on_change(self) -> None:
        self._notes.add(asyncio.create_task(self._note()))

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, model: ModelFacts | None) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: self.session.model == model)

    def submit(self, key: str, deadline: float | None = None) -> Request:
        request = Request()
        self.session.submit(scheduler_v1.Submit(key=key), request, deadline)
        return request


@asynccontextmanager
async def dialling(*addresses: str) -> AsyncIterator[Client]:
    client = Client(*addresses)
    task = asyncio.create_task(client.session.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with serving(ScriptedScheduler(MODEL)) as scheduler:
        yield scheduler


@pytest.fixture
async def client(scheduler: ScriptedScheduler) -> AsyncIterator[Client]:
    async with dialling(scheduler.address) as client:
        await client.wait_for(FACTS)
        yield client


async def running(client: Client, scheduler: ScriptedScheduler, key: str = "k") -> Request:
    """A request that is accepted."""
    request = client.submit(key)
    await scheduler.next("submit")
    scheduler.session.accept(key)
    assert await request.next() == ("accepted", None)
    return request


async def test_the_status_tells_what_is_ready(client: Client, scheduler: ScriptedScheduler) -> None:
    scheduler.session.status(None)
    await client.wait_for(None)
    scheduler.session.status(MODEL)
    await client.wait_for(FACTS)


async def test_the_first_scheduler_that_answers_is_used(scheduler: ScriptedScheduler) -> None:
    async with dialling("127.0.0.1:1", scheduler.address, "127.0.0.1:2") as client:
        await client.wait_for(FACTS)


@pytest.mark.parametrize("change", [{"tokenizer_fingerprint": b"\x02" * 32}, {"name": "other"}])
async def test_another_model_is_not_ready_and_logged(
    change: dict[str, Any], client: Client, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    other = scheduler_v1.Model()
    other.CopyFrom(MODEL)
    other.MergeFrom(scheduler_v1.Model(**change))
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        scheduler.session.status(other)
        await client.wait_for(None)
    (record,) = caplog.records
    logged = vars(record)
    assert logged["tokenizer_fingerprint"] == FINGERPRINT.hex()
    assert logged["scheduler_tokenizer_fingerprint"] == other.tokenizer_fingerprint.hex()
    assert (logged["model"], logged["scheduler_model"]) == ("tiny", other.name)


async def test_events_reach_their_request_alone(client: Client, scheduler: ScriptedScheduler) -> None:
    first, second = await running(client, scheduler, "a"), await running(client, scheduler, "b")
    scheduler.session.tokens("b", [1, 2], 0)
    scheduler.session.tokens("unknown", [3], 0)
    scheduler.session.tokens("a", [4], 0)
    assert await first.next() == ("tokens", [4])
    assert await second.next() == ("tokens", [1, 2])


async def test_nothing_is_submitted_while_no_model_is_ready(scheduler: ScriptedScheduler) -> None:
    client = Client(scheduler.address)
    with pytest.raises(QuireError) as refusal:
        client.submit("k")
    assert refusal.value.reason is Reason.MODEL_NOT_READY
    assert refusal.value.retry_after


async def test_a_key_that_runs_here_is_refused_and_its_request_goes_on(
    client: Client, scheduler: ScriptedScheduler
) -> None:
    request = await running(client, scheduler)
    with pytest.raises(QuireError) as refusal:
        client.submit("k")
    assert refusal.value.reason is Reason.IDEMPOTENCY_KEY_REUSED
    scheduler.session.tokens("k", [1], 0)
    assert await request.next() == ("tokens", [1])


async def test_a_request_is_submitted_again_until_accepted(client: Client, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k")
    first = await scheduler.next("submit")
    scheduler.session.close()
    again = await scheduler.next("submit")
    assert first.submission_id
    assert again == first
    scheduler.session.accept("k")
    assert await request.next() == ("accepted", None)


async def test_each_submission_has_an_id_of_its_own(client: Client, scheduler: ScriptedScheduler) -> None:
    for _ in range(2):
        client.submit("k")
        client.session.release("k", OnLeave.CANCEL)
    assert len({(await scheduler.next("submit")).submission_id for _ in range(2)}) == 2


async def test_what_was_accepted_fails_when_the_stream_breaks(client: Client, scheduler: ScriptedScheduler) -> None:
    request = await running(client, scheduler)
    scheduler.session.close()
    error = await request.failure()
    assert error.reason is Reason.CAPACITY_EXHAUSTED
    assert error.retry_after


async def test_a_request_that_no_scheduler_takes_fails_in_time(
    client: Client, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SUBMIT_PATIENCE_SECONDS", 0.01)
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.status(None)
    assert (await request.failure()).reason is Reason.CAPACITY_EXHAUSTED


async def test_events_of_an_older_term_are_dropped(client: Client, scheduler: ScriptedScheduler) -> None:
    request = await running(client, scheduler)
    scheduler.epoch = 5
    scheduler.session.tokens("k", [1], 0)
    old = scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens(offset=1, token_ids=[2]))
    scheduler.session.send([old], epoch=4)
    scheduler.session.tokens("k", [3], 1)
    assert await request.next() == ("tokens", [1])
    assert await request.next() == ("tokens", [3])


async def test_a_scheduler_of_an_older_term_is_left_for_the_next(scheduler: ScriptedScheduler) -> None:
    scheduler.epoch = 5
    async with (
        serving(ScriptedScheduler(MODEL, epoch=7)) as newer,
        dialling(newer.address, scheduler.address) as client,
    ):
        await client.wait_for(FACTS)
        newer.epoch = 4
        newer.session.close()
        await newer.joined(3)  # both were tried and left, and tried again
        assert len(scheduler.sessions) >= 1
        assert client.session.model is None


async def test_tokens_before_the_acceptance_are_an_older_requests(client: Client, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.tokens("k", [1], 7)
    scheduler.session.accept("k")
    scheduler.session.tokens("k", [2], 0)
    assert await request.next() == ("accepted", None)
    assert await request.next() == ("tokens", [2])


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (scheduler_v1.FAILURE_REASON_KEY_IN_USE, Reason.IDEMPOTENCY_KEY_REUSED),
        (scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
        (scheduler_v1.FAILURE_REASON_CANCELLED, Reason.CANCELLED),
        (scheduler_v1.FAILURE_REASON_INVALID, Reason.INVALID_FIELD),
        (scheduler_v1.FAILURE_REASON_INTERNAL, Reason.INTERNAL),
        (scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, Reason.CONTEXT_LENGTH_EXCEEDED),
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, Reason.CAPACITY_EXHAUSTED),
        (scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA, Reason.TENANT_QUOTA_EXCEEDED),
        (scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE, Reason.DEADLINE_TOO_SHORT),
        (scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE, Reason.INVALID_FIELD),
        (scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS, Reason.INVALID_FIELD),
        (scheduler_v1.FAILURE_REASON_UNSPECIFIED, Reason.INTERNAL),
    ],
)
async def test_a_failure_is_told_as_its_reason(
    reason: scheduler_v1.FailureReason, expected: Reason, client: Client, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.fail("k", reason, "why it is so")
    error = await request.failure()
    assert error.reason is expected
    assert ("why it is so" in error.message) == (expected in TOLD_WHY)


async def test_every_reason_of_the_scheduler_is_known(client: Client, scheduler: ScriptedScheduler) -> None:
    unknown = {scheduler_v1.FAILURE_REASON_UNSPECIFIED, scheduler_v1.FAILURE_REASON_INTERNAL}
    for number in scheduler_v1.FailureReason.values():
        reason = cast("scheduler_v1.FailureReason", number)
        request = client.submit("k")
        await scheduler.next("submit")
        scheduler.session.fail("k", reason)
        assert ((await request.failure()).reason is Reason.INTERNAL) == (reason in unknown)


@pytest.mark.parametrize(
    ("reason", "untold"),
    [
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, 1.0),
        (scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA, 1.0),
        (scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE, None),
    ],
)
async def test_a_refusal_says_when_to_try_again(
    reason: scheduler_v1.FailureReason, untold: float | None, client: Client, scheduler: ScriptedScheduler
) -> None:
    for told, expected in ((Duration(seconds=7, nanos=250_000_000), 7.25), (None, untold)):
        request = client.submit("k")
        await scheduler.next("submit")
        scheduler.session.fail("k", reason, retry_after=told)
        assert (await request.failure()).retry_after == expected


@pytest.mark.parametrize(
    ("reason", "field"),
    [
        (scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE, "my beam_search.width"),
        (scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS, "my stopping.max_tokens"),
        (scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, "my stopping.max_tokens"),
        (scheduler_v1.FAILURE_REASON_INVALID, None),
    ],
)
async def test_what_a_refusal_is_about_is_spelled_as_its_client_does(
    reason: scheduler_v1.FailureReason, field: str | None, client: Client, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.fail("k", reason)
    assert (await request.failure()).field == field


async def test_an_event_that_cannot_be_handled_fails_its_request_alone(
    client: Client, scheduler: ScriptedScheduler
) -> None:
    broken, other = await running(client, scheduler, "a"), await running(client, scheduler, "b")
    scheduler.session.tokens("a", [1], 0, index=99)
    scheduler.session.tokens("b", [2], 0)
    error = await broken.failure()
    assert error.reason is Reason.INTERNAL
    assert "secret" not in error.message
    assert (await scheduler.next("cancel")).key == "a"
    assert await other.next() == ("tokens", [2])


async def test_the_time_left_goes_with_the_request(client: Client, scheduler: ScriptedScheduler) -> None:
    client.submit("k", deadline=time.monotonic() + 60)
    submit = await scheduler.next("submit")
    assert 50 < submit.time_left.ToTimedelta().total_seconds() <= 60
    client.submit("endless")
    assert not (await scheduler.next("submit")).HasField("time_left")


async def test_a_deadline_holds_though_the_scheduler_says_nothing(client: Client, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k", deadline=time.monotonic() + 0.01)
    assert (await request.failure()).reason is Reason.DEADLINE_EXCEEDED
    assert (await scheduler.next("cancel")).key == "k"


@pytest.mark.parametrize(("on_leave", "kind"), [(OnLeave.CANCEL, "cancel"), (OnLeave.DETACH, "detach")])
async def test_a_request_that_is_left_is_told_of_and_hears_no_more(
    on_leave: OnLeave, kind: str, client: Client, scheduler: ScriptedScheduler
) -> None:
    request = await running(client, scheduler)
    client.session.release("k", on_leave)
    assert (await scheduler.next(kind)).key == "k"
    other = await running(client, scheduler, "other")
    scheduler.session.tokens("k", [1], 0)
    scheduler.session.tokens("other", [2], 0)
    assert await other.next() == ("tokens", [2])
    assert request.told.empty()


async def test_a_cancel_goes_to_the_scheduler_whoever_runs_the_request(
    client: Client, scheduler: ScriptedScheduler
) -> None:
    client.session.cancel("elsewhere")
    assert (await scheduler.next("cancel")).key == "elsewhere"


async def test_without_a_scheduler_only_requests_that_wait_here_can_be_cancelled() -> None:
    async with AsyncExitStack() as stack:
        serving_here = AsyncExitStack()
        scheduler = await serving_here.enter_async_context(serving(ScriptedScheduler(MODEL)))
        client = await stack.enter_async_context(dialling(scheduler.address))
        await client.wait_for(FACTS)
        waiting = client.submit("k")
        await scheduler.next("submit")
        await serving_here.aclose()
        await client.wait_for(None)
        client.session.cancel("k")
        assert (await waiting.failure()).reason is Reason.CANCELLED
        with pytest.raises(QuireError) as refusal:
            client.session.cancel("elsewhere")
        assert refusal.value.reason is Reason.CAPACITY_EXHAUSTED

"""Requests over a session: the commands that a scheduler receives, and the events that readers receive. Real streams,
to scripted schedulers."""

import time
from typing import cast

import pytest
from google.protobuf.duration_pb2 import Duration

from gateway_sessions import SessionClient, grown, sequence, there
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, length_end
from svc_common.errors import QuireError, Reason

DISCLOSED_REASONS = {
    Reason.INVALID_FIELD,
    Reason.CONTEXT_LENGTH_EXCEEDED,
    Reason.TENANT_QUOTA_EXCEEDED,
    Reason.DEADLINE_TOO_SHORT,
    Reason.GRAMMAR_TOO_COMPLEX,
    Reason.STORE_DEGRADED,
}


async def test_events_reach_their_request_alone(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    first, second = await client.running(scheduler, "a"), await client.running(scheduler, "b")
    scheduler.session.tokens("b", [1, 2], 0)
    scheduler.session.tokens("unknown", [3], 0)
    scheduler.session.tokens("a", [4], 0)
    assert await first.next() == ("tokens", [4])
    assert await second.next() == ("tokens", [1, 2])


async def test_nothing_is_submitted_while_no_model_is_ready(scheduler: ScriptedScheduler) -> None:
    client = SessionClient([scheduler.address], reconnect_timeout=60)
    with pytest.raises(QuireError) as refusal:
        client.submit("k")
    assert refusal.value.reason is Reason.MODEL_NOT_READY
    assert refusal.value.retry_after


async def test_a_request_is_submitted_again_until_accepted(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k")
    first = await scheduler.next("submit")
    scheduler.session.close()
    again = await scheduler.next("submit")
    assert first.submission_id
    assert first.command_id != again.command_id
    first.command_id = again.command_id
    assert again == first
    scheduler.session.accept("k")
    assert await request.next() == ("accepted", True)


async def test_a_request_that_is_submitted_again_counts_alone(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    """Others of its call may have been accepted: the next leader would wait for them."""
    client.submit("k", call=scheduler_v1.CountedCall(id=b"call", num_requests=3))
    assert (await scheduler.next("submit")).call.num_requests == 3
    scheduler.session.close()
    assert not (await scheduler.next("submit")).HasField("call")


async def test_each_submission_has_an_id_of_its_own(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    for _ in range(2):
        client.submit("k").disconnect(OnDisconnect.CANCEL)
    assert len({(await scheduler.next("submit")).submission_id for _ in range(2)}) == 2


async def test_tokens_before_the_acceptance_are_ignored(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.tokens("k", [1], 7)
    scheduler.session.accept("k")
    scheduler.session.tokens("k", [2], 0)
    assert await request.next() == ("accepted", True)
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
        (scheduler_v1.FAILURE_REASON_PROMPT_TOO_COSTLY, Reason.INVALID_FIELD),
        (scheduler_v1.FAILURE_REASON_GRAMMAR_TOO_COMPLEX, Reason.GRAMMAR_TOO_COMPLEX),
        (scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST, Reason.REQUEST_UNKNOWN),
        (scheduler_v1.FAILURE_REASON_QUARANTINED, Reason.REQUEST_QUARANTINED),
        (scheduler_v1.FAILURE_REASON_STORE_DEGRADED, Reason.STORE_DEGRADED),
        (scheduler_v1.FAILURE_REASON_DIVERGED, Reason.INTERNAL),
        (scheduler_v1.FAILURE_REASON_UNSPECIFIED, Reason.INTERNAL),
    ],
)
async def test_a_failure_becomes_an_error_with_its_reason(
    reason: scheduler_v1.FailureReason, expected: Reason, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.fail("k", reason, "why it is so")
    error = await request.failure()
    assert error.reason is expected
    assert ("why it is so" in error.message) == (expected in DISCLOSED_REASONS)


async def test_every_reason_of_the_scheduler_is_known(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    unknown = {
        scheduler_v1.FAILURE_REASON_UNSPECIFIED,
        scheduler_v1.FAILURE_REASON_INTERNAL,
        scheduler_v1.FAILURE_REASON_DIVERGED,
    }
    for number in scheduler_v1.FailureReason.values():
        reason = cast("scheduler_v1.FailureReason", number)
        request = client.submit("k")
        await scheduler.next("submit")
        scheduler.session.fail("k", reason)
        assert ((await request.failure()).reason is Reason.INTERNAL) == (reason in unknown)


@pytest.mark.parametrize(
    ("reason", "default"),
    [
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, 1.0),
        (scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA, 1.0),
        (scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE, None),
    ],
)
async def test_a_refusal_has_a_time_to_retry(
    reason: scheduler_v1.FailureReason, default: float | None, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    for sent, expected in ((Duration(seconds=7, nanos=250_000_000), 7.25), (None, default)):
        request = client.submit("k")
        await scheduler.next("submit")
        scheduler.session.fail("k", reason, retry_after=sent)
        assert (await request.failure()).retry_after == expected


@pytest.mark.parametrize(
    ("reason", "field"),
    [
        (scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE, "my beam_search.width"),
        (scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS, "my stopping.max_tokens"),
        (scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, "my stopping.max_tokens"),
        (scheduler_v1.FAILURE_REASON_PROMPT_TOO_COSTLY, "my prompt"),
        (scheduler_v1.FAILURE_REASON_INVALID, None),
    ],
)
async def test_the_field_of_a_refusal_is_spelled_as_its_client_does(
    reason: scheduler_v1.FailureReason, field: str | None, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.fail("k", reason)
    assert (await request.failure()).field == field


async def test_an_event_that_cannot_be_handled_fails_its_request_alone(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    broken, other = await client.running(scheduler, "a"), await client.running(scheduler, "b")
    scheduler.session.tokens("a", [1], 0, index=99)
    scheduler.session.tokens("b", [2], 0)
    error = await broken.failure()
    assert error.reason is Reason.INTERNAL
    assert "secret" not in error.message
    assert (await scheduler.next("cancel")).key == "a"
    assert await other.next() == ("tokens", [2])


async def test_the_time_left_goes_with_the_request(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    client.submit("k", deadline=time.monotonic() + 60)
    submit = await scheduler.next("submit")
    assert 50 < submit.time_left.ToTimedelta().total_seconds() <= 60
    client.submit("endless")
    assert not (await scheduler.next("submit")).HasField("time_left")


async def test_a_reader_without_a_submission_attaches(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = client.attach("k")
    attach = await scheduler.next("attach")
    assert (attach.key, list(attach.unflushed)) == ("k", [])
    scheduler.session.attached(there(), sequence(5, 6))
    scheduler.session.tokens("k", [7], 2)
    assert await request.next() == ("attached", {0: [5, 6]})
    assert await request.next() == ("tokens", [7])


async def test_a_reader_of_an_unknown_request_fails(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = client.attach("k")
    await scheduler.next("attach")
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST)
    assert (await request.failure()).reason is Reason.REQUEST_UNKNOWN


async def test_a_submission_may_be_answered_with_attached(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.attached(there(), sequence(5, end=length_end()))
    assert await request.next() == ("attached", {0: [5]})


async def test_all_readers_of_a_request_receive_its_events(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    first = await client.running(scheduler)
    await grown(scheduler, first, 5)
    second = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.tokens("k", [6], 1)  # it is not admitted yet
    scheduler.session.attached(there(), sequence(5, 6))
    scheduler.session.tokens("k", [7], 2)
    assert [await first.next(), await first.next()] == [("tokens", [6]), ("tokens", [7])]
    assert [await second.next(), await second.next()] == [("attached", {0: [5, 6]}), ("tokens", [7])]
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_CANCELLED)
    assert (await first.failure()).reason is (await second.failure()).reason is Reason.CANCELLED


async def test_a_refused_reader_does_not_affect_the_others(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    first = await client.running(scheduler)
    second = client.submit("k", body_digest=b"other")
    await scheduler.next("submit")
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_KEY_IN_USE)
    assert (await second.failure()).reason is Reason.IDEMPOTENCY_KEY_REUSED
    await grown(scheduler, first, 5)


async def test_waiting_readers_are_submitted_one_by_one(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    first, second = client.submit("k"), client.submit("k")
    await scheduler.next("submit")
    client.session.cancel("other")
    await scheduler.next("cancel")
    assert len(scheduler.all("submit")) == 1
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_UNAVAILABLE)
    assert (await first.failure()).reason is Reason.CAPACITY_EXHAUSTED
    await scheduler.next("submit")
    scheduler.session.accept("k")
    assert await second.next() == ("accepted", True)


async def test_a_stop_string_is_sent_once_however_many_readers_find_it(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first = await client.running(scheduler)
    second = client.attach("k")
    first.stop_at(0, 2)
    second.stop_at(0, 2)
    await scheduler.next("attach")
    scheduler.session.attached(there(), sequence(5))
    await second.next()
    await grown(scheduler, first, 5, 6)
    await second.next()
    client.session.cancel("other")
    await scheduler.next("cancel")
    assert len(scheduler.all("finish")) == 1


async def test_a_reader_receives_whether_its_request_is_durable(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.accept("k", is_durable=False)
    assert await request.next() == ("accepted", False)

"""Readers that disconnect and requests that are cancelled: the commands that the scheduler receives.

Real streams, to scripted schedulers.
"""

import time

import pytest

from gateway_sessions import SessionClient, sequence, there
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler
from svc_common.errors import QuireError, Reason


async def test_a_deadline_is_enforced_without_an_answer(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = client.submit("k", deadline=time.monotonic() + 0.01)
    assert (await request.failure()).reason is Reason.DEADLINE_EXCEEDED
    assert (await scheduler.next("cancel")).key == "k"


@pytest.mark.parametrize(("on_disconnect", "kind"), [(OnDisconnect.CANCEL, "cancel"), (OnDisconnect.DETACH, "detach")])
async def test_a_reader_that_left_is_reported_and_receives_no_more_events(
    on_disconnect: OnDisconnect, kind: str, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    request.disconnect(on_disconnect)
    assert (await scheduler.next(kind)).key == "k"
    other = await client.running(scheduler, "other")
    scheduler.session.tokens("k", [1], 0)
    scheduler.session.tokens("other", [2], 0)
    assert await other.next() == ("tokens", [2])
    assert request.events.empty()


async def test_a_cancel_is_sent_for_requests_of_other_gateways(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    client.session.cancel("elsewhere")
    assert (await scheduler.next("cancel")).key == "elsewhere"


async def test_a_request_that_waits_here_can_be_cancelled_without_a_scheduler(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    await scheduler.lost()
    waiting = client.submit("k")
    client.session.cancel("k")
    assert (await waiting.failure()).reason is Reason.CANCELLED
    with pytest.raises(QuireError) as refusal:
        client.session.cancel("elsewhere")
    assert refusal.value.reason is Reason.CAPACITY_EXHAUSTED


async def test_a_cancel_without_a_scheduler_reaches_the_next_one(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await scheduler.lost()
    client.session.cancel("k")
    assert (await request.failure()).reason is Reason.CANCELLED
    scheduler.is_leader = True
    assert (await scheduler.next("cancel")).key == "k"
    assert not scheduler.all("attach")


@pytest.mark.parametrize("on_disconnect", OnDisconnect)
async def test_nothing_is_sent_while_other_readers_stay(
    on_disconnect: OnDisconnect, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first = await client.running(scheduler)
    second = client.attach("k")
    await scheduler.next("attach")
    scheduler.session.attached(there(), sequence())
    await second.next()
    first.disconnect(on_disconnect)
    second.disconnect(OnDisconnect.DETACH)
    assert (await scheduler.next("detach")).key == "k"
    assert not scheduler.all("cancel")
    assert len(scheduler.all("detach")) == 1


async def test_a_reader_that_joined_a_request_does_not_cancel_it(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.attach("k")
    await scheduler.next("attach")
    scheduler.session.attached(there(), sequence(5))
    await request.next()
    request.disconnect(OnDisconnect.CANCEL)
    assert (await scheduler.next("detach")).key == "k"
    assert not scheduler.all("cancel")


async def test_a_submission_that_joined_a_request_does_not_cancel_it(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.attached(there(submission_id="there"), sequence(5))
    await request.next()
    request.disconnect(OnDisconnect.CANCEL)
    assert (await scheduler.next("detach")).key == "k"
    assert not scheduler.all("cancel")


async def test_a_submission_that_is_answered_with_its_own_request_cancels_it(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    submit = await scheduler.next("submit")
    scheduler.session.close()  # the Accepted event was lost
    await scheduler.next("submit")
    scheduler.session.attached(submit, sequence(5))
    await request.next()
    request.disconnect(OnDisconnect.CANCEL)
    assert (await scheduler.next("cancel")).submission_id == submit.submission_id


async def test_the_deadline_of_a_call_that_joined_ends_that_call_alone(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k", deadline=time.monotonic() + 2)
    await scheduler.next("submit")
    scheduler.session.attached(there(), sequence(5))
    what, failure = await request.next()
    while what != "failed":
        what, failure = await request.next()
    assert failure.reason is Reason.DEADLINE_EXCEEDED
    assert (await scheduler.next("detach")).key == "k"
    assert "there" not in {cancel.submission_id for cancel in scheduler.all("cancel")}


async def test_an_internal_error_of_a_joined_reader_does_not_cancel_the_request(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.attached(there(), sequence(5))
    await request.next()
    scheduler.session.tokens("k", [6], 1, index=99)
    assert (await request.failure()).reason is Reason.INTERNAL
    assert (await scheduler.next("detach")).key == "k"
    assert not scheduler.all("cancel")


@pytest.mark.parametrize(("on_disconnect", "kind"), [(OnDisconnect.CANCEL, "cancel"), (OnDisconnect.DETACH, "detach")])
async def test_the_last_reader_is_reported_when_a_new_one_is_refused(
    on_disconnect: OnDisconnect, kind: str, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first = await client.running(scheduler)
    submission_id = scheduler.all("submit")[0].submission_id
    second = client.submit("k", body_digest=b"other")
    await scheduler.next("submit")
    first.disconnect(on_disconnect)
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_KEY_IN_USE)
    assert (await second.failure()).reason is Reason.IDEMPOTENCY_KEY_REUSED
    sent = await scheduler.next(kind)
    assert sent.key == "k"
    assert kind == "detach" or sent.submission_id == submission_id


async def test_the_last_reader_is_not_reported_when_a_new_one_is_admitted(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first = await client.running(scheduler)
    submission_id = scheduler.all("submit")[0].submission_id
    second = client.submit("k")
    await scheduler.next("submit")
    first.disconnect(OnDisconnect.CANCEL)
    scheduler.session.attached(there(submission_id=submission_id), sequence(5))
    assert await second.next() == ("attached", {0: [5]})
    second.disconnect(OnDisconnect.CANCEL)
    await scheduler.next("detach")
    assert not scheduler.all("cancel")


@pytest.mark.parametrize("on_disconnect", OnDisconnect)
async def test_a_reader_that_left_before_the_answer_is_reported_when_the_next_one_is_refused(
    on_disconnect: OnDisconnect, client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first, second = client.submit("k"), client.submit("k", body_digest=b"other")
    await scheduler.next("submit")
    first_id = scheduler.session.asked["k"]
    first.disconnect(on_disconnect)
    await scheduler.next("submit")
    second_id, scheduler.session.asked["k"] = scheduler.session.asked["k"], first_id
    scheduler.session.accept("k")
    scheduler.session.asked["k"] = second_id
    num_detached = len(scheduler.all("detach"))
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_KEY_IN_USE)
    assert (await second.failure()).reason is Reason.IDEMPOTENCY_KEY_REUSED
    for _ in range(num_detached + 1):
        assert (await scheduler.next("detach")).key == "k"


async def test_the_end_of_an_earlier_request_does_not_fail_a_waiting_reader(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first, second = client.submit("k"), client.submit("k")
    await scheduler.next("submit")
    first.disconnect(OnDisconnect.CANCEL)
    await scheduler.next("submit")
    second_id = scheduler.session.asked.pop("k")
    scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_CANCELLED)
    scheduler.session.asked["k"] = second_id
    scheduler.session.accept("k")
    assert await second.next() == ("accepted", True)


async def test_no_command_is_sent_for_readers_that_fail_together(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first = await client.running(scheduler)
    second, third = client.submit("k"), client.submit("k")
    await scheduler.next("submit")
    scheduler.session.tokens("k", [1], 0, index=99)
    for one in (first, second, third):
        assert (await one.failure()).reason is Reason.INTERNAL
    await scheduler.next("cancel")
    client.session.cancel("other")
    while (await scheduler.next("cancel")).key != "other":
        pass
    assert len(scheduler.all("submit")) == 2


async def test_an_answer_to_a_reader_that_left_is_answered_with_detach(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    request = client.attach("k")
    await scheduler.next("attach")
    request.disconnect(OnDisconnect.DETACH)
    await scheduler.next("detach")
    scheduler.session.attached(there(), sequence(5))
    assert (await scheduler.next("detach")).key == "k"


async def test_an_answer_to_a_reader_that_left_does_not_admit_the_next_one(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    first, second = client.submit("k"), client.submit("k")
    await scheduler.next("submit")
    first_id = scheduler.session.asked["k"]
    first.disconnect(OnDisconnect.DETACH)
    await scheduler.next("submit")
    second_id = scheduler.session.asked["k"]
    scheduler.session.asked["k"] = first_id
    scheduler.session.accept("k")
    scheduler.session.asked["k"] = second_id
    scheduler.session.attached(there(), sequence(5))
    assert await second.next() == ("attached", {0: [5]})

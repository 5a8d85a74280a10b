"""A scheduler that takes over does not know a request: the gateway submits it again, or fails it."""

import time

import pytest

from gateway_sessions import SessionClient, grown, sequence, there
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler
from svc_common.errors import Reason
from takeovers import only_submit, settled, take_over, taken_over

UNKNOWN = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST


async def test_an_unknown_request_is_submitted_again_with_its_tokens(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    first = only_submit(scheduler)
    await grown(scheduler, request, 5, 6)
    scheduler.session.durable("k", 1)
    await settled(scheduler, request)
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    again = await successor.next("submit")
    assert again.submission_id == first.submission_id
    assert (again.was_accepted, again.prompt_cost) == (True, 0)
    (unflushed,) = again.unflushed
    assert (unflushed.index, unflushed.offset, list(unflushed.token_ids)) == (0, 0, [5, 6])
    successor.session.accept("k")
    successor.session.tokens("k", [7], 2)
    assert await request.next() == ("tokens", [7])


async def test_a_scheduler_is_sent_what_its_predecessor_was_paid_for_the_prompt(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    assert not only_submit(scheduler).was_accepted
    paid = scheduler_v1.PromptPaid(num_tokens=17)
    scheduler.session.send([scheduler_v1.Event(key="k", prompt_paid=paid)])
    await grown(scheduler, request, 5)
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    again = await successor.next("submit")
    assert (again.was_accepted, again.prompt_cost) == (True, 17)


async def test_an_unknown_request_of_another_gateway_fails(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = client.attach("k")
    await scheduler.next("attach")
    scheduler.session.attached(there(), sequence(5))
    await request.next()
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    assert (await request.failure()).reason is Reason.CAPACITY_EXHAUSTED


async def test_a_repeated_submission_has_the_time_left(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = client.submit("k", deadline=time.monotonic() + 60)
    await scheduler.next("submit")
    scheduler.session.accept("k")
    await request.next()
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    again = await successor.next("submit")
    assert 50 < again.time_left.ToTimedelta().total_seconds() <= 60


async def test_nothing_of_a_repeated_submission_is_durable(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await taken_over(client, scheduler, successor, num_durable=2)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    await successor.next("submit")
    successor.session.accept("k")
    await settled(successor, request)
    successor.session.close()
    await successor.next("attach")
    (unflushed,) = successor.all("attach")[-1].unflushed
    assert (unflushed.offset, list(unflushed.token_ids)) == (0, [5, 6])


async def test_an_unknown_request_fails_when_its_model_does_not_come_back(
    client: SessionClient,
    scheduler: ScriptedScheduler,
    successor: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client.session._subscriptions, "_reconnect_timeout", 0.01)
    request = await client.running(scheduler)
    successor.models = ()
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    assert (await request.failure()).reason is Reason.CAPACITY_EXHAUSTED
    assert not successor.all("submit")


async def test_a_joined_request_is_submitted_again_without_the_calls_deadline(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = client.submit("k", deadline=time.monotonic() + 60)
    await scheduler.next("submit")
    scheduler.session.attached(there(), sequence(5))
    await request.next()
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    again = await successor.next("submit")
    assert (again.submission_id, again.HasField("time_left")) == ("there", False)


@pytest.mark.parametrize("own", [None, scheduler_v1.Retention(seconds=60)], ids=["default", "a minute"])
@pytest.mark.parametrize(
    "retention", [None, scheduler_v1.Retention(is_unrecorded=True)], ids=["joins default", "joins none"]
)
async def test_a_joined_request_is_submitted_again_with_its_own_retention(
    client: SessionClient,
    scheduler: ScriptedScheduler,
    successor: ScriptedScheduler,
    own: scheduler_v1.Retention | None,
    retention: scheduler_v1.Retention | None,
) -> None:
    """A request that must not be recorded stays so, whatever a call under the same name asks for."""
    request, running = client.submit("k", retention=own), there()
    if retention is not None:
        running.retention.CopyFrom(retention)
    await scheduler.next("submit")
    scheduler.session.attached(running, sequence(5))
    await request.next()
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", UNKNOWN)
    again = await successor.next("submit")
    assert (again.retention if again.HasField("retention") else None) == retention

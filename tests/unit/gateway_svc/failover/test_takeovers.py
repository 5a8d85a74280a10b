"""A scheduler dies in mid-stream and another one takes over: what the gateway sends, and what readers receive."""

import pytest

from gateway_sessions import SessionClient, grown, sequence, there
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, cut_end, length_end
from svc_common.errors import Reason
from takeovers import only_submit, settled, take_over, taken_over

DIVERGED = scheduler_v1.FAILURE_REASON_DIVERGED


async def test_a_request_continues_at_the_next_scheduler(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await grown(scheduler, request, 5, 6)
    await take_over(scheduler, successor)
    attach = await successor.next("attach")
    assert (attach.key, attach.command_id > 0) == ("k", True)
    successor.session.attached(there(), sequence(5, 6))
    successor.session.tokens("k", [7], 2)
    assert await request.next() == ("attached", {0: [5, 6]})
    assert await request.next() == ("tokens", [7])
    assert not successor.all("submit")


async def test_exactly_the_unflushed_tokens_are_sent(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await grown(scheduler, request, 5, 6, 7, 8)
    scheduler.session.tokens("k", [9], 0, index=1)
    assert await request.next() == ("tokens", [9])
    scheduler.session.durable("k", 3)
    await settled(scheduler, request)
    await take_over(scheduler, successor)
    tails = {unflushed.index: unflushed for unflushed in (await successor.next("attach")).unflushed}
    assert (tails[0].offset, list(tails[0].token_ids)) == (3, [8])
    assert (tails[1].offset, list(tails[1].token_ids)) == (0, [9])


async def test_a_request_that_ended_meanwhile_is_failed_as_it_ended(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.fail("k", scheduler_v1.FAILURE_REASON_CANCELLED)
    assert (await request.failure()).reason is Reason.CANCELLED


async def test_a_scheduler_may_die_before_it_answers(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await take_over(scheduler, successor)
    first = await successor.next("attach")
    successor.session.close()
    again = await successor.next("attach")
    assert again.command_id != first.command_id
    successor.session.attached(there(), sequence(5))
    assert await request.next() == ("attached", {0: [5]})


async def test_events_of_the_scheduler_before_are_dropped(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await take_over(scheduler, successor)
    await successor.next("attach")
    old = scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens(token_ids=[9]))
    successor.session.send([old], epoch=1)
    successor.session.send([old])  # and events before the answer
    successor.session.attached(there(), sequence(5))
    assert await request.next() == ("attached", {0: [5]})


async def test_a_new_reader_waits_until_the_request_is_attached_again(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await take_over(scheduler, successor)
    await successor.next("attach")
    second = client.submit("k")
    successor.session.attached(there(), sequence(5))
    await request.next()
    await successor.next("submit")
    successor.session.attached(there(), sequence(5))
    assert await second.next() == ("attached", {0: [5]})
    successor.session.tokens("k", [6], 1)
    assert await second.next() == await request.next() == ("tokens", [6])


async def test_a_stop_match_is_sent_to_the_next_scheduler(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    await grown(scheduler, request, 5, 6, 7)
    scheduler.session.durable("k", 3)
    request.stop_at(0, 2)
    await settled(scheduler, request)
    assert (await scheduler.next("finish")).num_tokens == 2
    await take_over(scheduler, successor)
    (unflushed,) = (await successor.next("attach")).unflushed
    assert (unflushed.offset, list(unflushed.token_ids), unflushed.is_truncated) == (2, [], True)
    successor.session.attached(there(), sequence(5, 6, 7))
    assert await request.next() == ("attached", {0: [5, 6, 7]})
    finish = await successor.next("finish")
    assert (finish.key, finish.index, finish.num_tokens, finish.submission_id) == ("k", 0, 2, "there")


async def test_a_stop_match_that_the_scheduler_has_is_not_sent_again(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    request.stop_at(0, 2)
    await grown(scheduler, request, 5, 6)
    request.stop_at(0, 2, is_last=True)
    await take_over(scheduler, successor)
    await successor.next("attach")
    successor.session.attached(there(), sequence(5, 6, end=cut_end()))
    await request.next()
    client.session.cancel("other")
    await successor.next("cancel")
    assert not successor.all("finish")


async def test_the_end_of_a_request_without_readers_is_sent_again_with_its_tokens(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    request.stop_at(0, 3, is_last=True)
    await grown(scheduler, request, 5)
    scheduler.session.durable("k", 1)
    await grown(scheduler, request, 6, 7)
    await take_over(scheduler, successor)
    attach = await successor.next("attach")
    assert (attach.key, attach.submission_id) == ("k", only_submit(scheduler).submission_id)
    (end,) = attach.unflushed
    assert (end.offset, list(end.token_ids), end.is_truncated) == (1, [6, 7], True)
    successor.session.attached(there(), sequence(5, 6, 7, end=cut_end()))
    assert (await successor.next("detach")).key == "k"


@pytest.mark.parametrize("has_failed", [True, False])
async def test_a_stop_match_of_a_failed_request_is_not_sent_again(
    has_failed: bool, client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    request.stop_at(0, 2)
    await grown(scheduler, request, 5, 6)
    if has_failed:
        scheduler.session.fail("k", scheduler_v1.FAILURE_REASON_CANCELLED)
        await request.failure()
    else:
        request.disconnect(OnDisconnect.CANCEL)
    await client.running(scheduler, "other")
    await take_over(scheduler, successor)
    await successor.next("attach")
    assert [attach.key for attach in successor.all("attach")] == ["other"]


async def test_a_durable_end_is_not_sent_again(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    request.stop_at(0, 2, is_last=True)
    await grown(scheduler, request, 5, 6)
    other = await client.running(scheduler, "other")
    scheduler.session.durable("k", 2)
    scheduler.session.tokens("other", [1], 0)
    await other.next()
    await take_over(scheduler, successor)
    await successor.next("attach")
    assert [attach.key for attach in successor.all("attach")] == ["other"]


async def test_a_request_without_readers_is_not_attached_again(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    left, stays = await client.running(scheduler, "left"), await client.running(scheduler, "stays")
    await scheduler.lost()
    left.disconnect(OnDisconnect.CANCEL)
    successor.is_leader = True
    assert (await successor.next("attach")).key == "stays"
    assert (await successor.next("cancel")).key == "left"
    assert len(successor.all("attach")) == 1
    successor.session.attached(scheduler_v1.Submit(key="stays", n=1), sequence(5, end=length_end()))
    await stays.next()


async def test_a_cancellation_that_a_lost_session_may_not_have_delivered_is_sent_again(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    """Their clients have the answer that the requests are cancelled. One has no reader here."""
    request = await client.running(scheduler)
    for key in ("k", "elsewhere"):
        client.session.cancel(key)
        await scheduler.next("cancel")
    await take_over(scheduler, successor)
    submission_id = scheduler.all("submit")[0].submission_id
    for cancel in (await successor.next("cancel"), await successor.next("cancel")):
        assert cancel.submission_id == (submission_id if cancel.key == "k" else "")
        # The next scheduler must not end a later request under the name.
        assert cancel.HasField("sent_ago") is (cancel.key != "k")
    await successor.next("attach")
    successor.session.fail("k", scheduler_v1.FAILURE_REASON_CANCELLED)
    assert (await request.failure()).reason is Reason.CANCELLED


async def test_a_cancellation_that_is_sent_again_and_again_counts_from_its_first_time(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    await client.running(scheduler)
    client.session.cancel("elsewhere")
    assert not (await scheduler.next("cancel")).HasField("sent_ago")
    await take_over(scheduler, successor)
    ago = []
    for _ in range(3):
        ago.append((await successor.next("cancel")).sent_ago.ToNanoseconds())
        successor.session.close()
    assert 0 < ago[0] < ago[1] < ago[2]


async def test_a_cancellation_is_not_sent_again_once_its_name_is_submitted_anew(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    client.session.cancel("k")
    await client.running(scheduler)
    await take_over(scheduler, successor)
    await successor.next("attach")
    assert not successor.all("cancel")


async def test_a_cancellation_of_long_ago_is_not_sent_again(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.running(scheduler)
    client.session.cancel("other")
    await scheduler.next("cancel")
    monkeypatch.setattr("gateway_svc.subscriptions._CANCEL_SECONDS", 0.0)
    await take_over(scheduler, successor)
    await successor.next("attach")
    assert not successor.all("cancel")


async def test_a_watermark_of_an_earlier_request_is_ignored(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.durable("k", 2)
    scheduler.session.accept("k")
    assert await request.next() == ("accepted", True)
    await grown(scheduler, request, 5, 6, 7)
    await take_over(scheduler, successor)
    (unflushed,) = (await successor.next("attach")).unflushed
    assert (unflushed.offset, list(unflushed.token_ids)) == (0, [5, 6, 7])


async def test_all_tokens_are_sent_when_the_store_has_lost_some(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await taken_over(client, scheduler, successor, num_durable=2)
    assert not (await successor.next("attach")).unflushed[0].token_ids
    successor.session.fail("k", DIVERGED)
    (unflushed,) = (await successor.next("attach")).unflushed
    assert (unflushed.offset, list(unflushed.token_ids)) == (0, [5, 6])
    successor.session.attached(there(), sequence(5, 6))
    assert await request.next() == ("attached", {0: [5, 6]})


async def test_a_request_that_diverges_twice_fails(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await taken_over(client, scheduler, successor, num_durable=1)
    for _ in range(2):
        await successor.next("attach")
        successor.session.fail("k", DIVERGED)
    assert (await request.failure()).reason is Reason.INTERNAL


async def test_a_reader_that_left_before_a_takeover_is_reported_to_the_next_scheduler(
    client: SessionClient, scheduler: ScriptedScheduler, successor: ScriptedScheduler
) -> None:
    request = await client.running(scheduler)
    client.submit("k", body_digest=b"other")
    await scheduler.next("submit")
    request.disconnect(OnDisconnect.CANCEL)
    await take_over(scheduler, successor)
    assert (await successor.next("cancel")).submission_id == scheduler.all("submit")[0].submission_id
    await successor.next("submit")

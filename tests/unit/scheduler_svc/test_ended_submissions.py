"""What was cancelled or deleted does not run again when it is submitted again."""

import pytest

from commands_bench import again, bench, named, unrecorded, until
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.request_log import State


async def test_a_cancelled_submission_is_not_revived_by_a_store_that_does_not_know(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.recorder._FLUSH", 0.05)
    async with bench(url) as on:
        await on.submit("first")
        on.store.goes_on.clear()
        for submission in ("second", "third"):
            on.cancel()
            assert (await on.submit(submission)).HasField("accepted")
            live = on.requests.get("k")
            assert live is not None
            assert live.log.submit.submission_id == submission
        on.store.goes_on.set()
        assert await on.journal.flush(20)
        record = await on.store.read("k")
        assert record is not None
        assert (record.submit.submission_id, record.state) == ("third", State.ACCEPTED)


async def test_a_cancelled_submission_that_is_repeated_is_not_run_again(url: str) -> None:
    async with bench(url) as on:
        await on.submit("first")
        on.store.goes_on.clear()
        on.cancel()
        assert (await on.submit("first")).failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        assert on.requests.get("k") is None


@pytest.mark.parametrize("gateway_attaches_first", [True, False])
async def test_a_request_that_was_deleted_while_its_gateway_was_away_does_not_run_again(
    gateway_attaches_first: bool, url: str
) -> None:
    """As after a takeover, when another gateway's client deletes it."""
    async with bench(url) as on:
        on.ask(submit=named())
        await until(lambda: 7 in on.answers)
        on.ask(delete=scheduler_v1.Delete(key="k", command_id=1))
        await until(lambda: 1 in on.answers)
        if gateway_attaches_first:
            assert (await on.attach()).failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        on.ask(submit=again(key="k", submission_id="k", retention=None))
        assert on.answers[8].failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        assert await on.store.read("k") is None


@pytest.mark.parametrize("gateway_attaches_first", [True, False])
async def test_a_request_that_was_deleted_in_an_earlier_term_does_not_run_again(
    gateway_attaches_first: bool, url: str
) -> None:
    """The scheduler ended before the gateway with the request's stream was sent its end."""
    async with bench(url) as before:
        before.ask(submit=named())
        await until(lambda: 7 in before.answers)
        before.ask(delete=scheduler_v1.Delete(key="k", command_id=1))
        await until(lambda: 1 in before.answers)
        assert before.answers[1].HasField("deleted")
    async with bench(url) as on:
        if gateway_attaches_first:
            assert (await on.attach()).failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        on.ask(submit=again(key="k", submission_id="k", retention=None))
        await until(lambda: 8 in on.answers)
        assert on.answers[8].failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        assert await on.store.read("k") is None
        assert (await on.submit("another")).HasField("accepted")


@pytest.mark.parametrize("was_known", [True, False])
async def test_a_request_without_a_record_that_was_cancelled_does_not_run_again(was_known: bool, url: str) -> None:
    async with bench(url) as on:
        if was_known:
            on.ask(submit=unrecorded(key="k", detachable=True))
            await until(lambda: 7 in on.answers)
        on.cancel()
        on.ask(submit=again(key="k"))
        assert on.answers[8].failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED

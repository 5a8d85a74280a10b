"""Commands for requests that have ended or are unknown, while the store is behind."""

import threading

import pytest

from commands_bench import bench, named, unrecorded, until
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from request_logs import request_log
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.events import FailedEvent, Failure
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.request_log import RequestLog
from scheduler_svc.session_wire import attached_message, record_message
from scheduler_svc.store.base import StoreUnavailable, WriteBatch
from store_writes import ending_of, packed, write_of


@pytest.mark.parametrize("failure", [Failure.QUARANTINED, Failure.DEADLINE_EXCEEDED, Failure.UNAVAILABLE])
async def test_a_later_attach_receives_why_the_request_failed(failure: Failure, url: str) -> None:
    async with bench(url) as on:
        await on.submit("first")
        event = on.core.cancel("k", failure)
        assert isinstance(event, FailedEvent)
        on.requests.dispatch([event])
        from_memory = (await on.attach()).failed.reason
        assert await on.journal.flush(20)
    async with bench(url) as after:
        assert (await after.attach()).failed.reason == from_memory
    assert scheduler_v1.FailureReason.Name(from_memory).endswith(failure.name)


async def test_a_full_queue_refuses_without_a_record_and_gives_again_what_has_finished(url: str) -> None:
    limits = SchedulerLimits(queue=AdmissionLimits(max_requests=1))
    async with bench(url, limits) as on:
        await on.submit("first")
        live = on.requests.get("k")
        assert live is not None
        on.requests.truncate(live, 0, 0)
        assert (await on.submit("waits", key="waiting")).HasField("accepted")
        refused = await on.submit("refused", key="refused")
        assert refused.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert (await on.submit("again")).attached.submission_id == "first"
        assert await on.journal.flush(20)
        assert await on.store.read("refused") is None


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({}, None),
        ({"tokenizer_fingerprint": b"other"}, None),  # it waits for a worker
        ({"prompt_token_ids": []}, scheduler_v1.FAILURE_REASON_INVALID),
    ],
)
async def test_a_request_that_needs_no_store_is_answered_at_once(
    fields: dict[str, object], failure: scheduler_v1.FailureReason | None, url: str
) -> None:
    async with bench(url) as on:
        on.ask(submit=unrecorded(**fields))
        answer = on.answers[7]
        assert (answer.failed.reason if answer.HasField("failed") else None) == failure
        assert (on.requests.get("v") is None) is (failure is not None)
        on.ask(submit=unrecorded(submission_id="again", command_id=8))
        assert on.answers[8].HasField("accepted" if failure is not None else "failed"), (
            "the key is free after a refusal"
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"retention": None},
        {"detachable": True},
        {"attachment": b"a"},
        {"limits": scheduler_v1.AccountLimits(account="t/", requests_per_minute=60)},
    ],
    ids=str,
)
async def test_a_request_that_needs_the_store_is_answered_once_that_has_answered(
    fields: dict[str, object], url: str
) -> None:
    async with bench(url) as on:
        on.ask(submit=unrecorded(**fields))
        assert not on.answers
        await until(lambda: 7 in on.answers)
        assert on.answers[7].HasField("accepted")


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_stream_is_looked_for_until_a_store_that_fails_for_a_moment_answers(
    is_recorded: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a takeover, while another server becomes Redis' primary: the stream ends where it is refused."""
    async with bench(url) as before:
        if is_recorded:
            await before.submit("first")
    async with bench(url) as on:
        read, num_failures = on.store.read, 3

        async def fail(key: str) -> RequestLog | None:
            nonlocal num_failures
            if num_failures:
                num_failures -= 1
                raise StoreUnavailable("away")
            return await read(key)

        monkeypatch.setattr(on.store, "read", fail)
        answer = await on.attach()
        assert answer.WhichOneof("kind") == ("attached" if is_recorded else "failed")
        if not is_recorded:
            assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST, "its gateway submits it again"


async def test_a_gateway_that_cannot_render_the_answer_is_refused_without_a_record(url: str) -> None:
    async with bench(url) as on:
        on.gateway.protocol = 1
        on.ask(submit=named(render_options=scheduler_v1.RenderOptions(echo=True)))
        assert on.answers[7].failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert await on.store.read("k") is None


async def test_a_call_runs_all_its_requests_or_none(url: str) -> None:
    account = scheduler_v1.AccountLimits(account="t/", requests_per_minute=4)
    async with bench(url) as on:
        for call_id, is_refused in ((b"one", False), (b"two", True)):
            part_of = scheduler_v1.CountedCall(id=call_id, num_requests=3)
            command_ids = range(len(on.answers) + 1, len(on.answers) + 4)
            for command_id in command_ids:
                name = f"{command_id}"
                on.ask(submit=unrecorded(key=name, limits=account, call=part_of, command_id=command_id))
            await until(lambda command_ids=command_ids: all(one in on.answers for one in command_ids))  # type: ignore[misc]
            for command_id in command_ids:
                assert on.answers[command_id].HasField("failed") is is_refused
        on.ask(submit=unrecorded(key="alone", limits=account, command_id=7))
        await until(lambda: 7 in on.answers)
        assert on.answers[7].HasField("accepted")


@pytest.mark.parametrize("num_tokens", [2, 5000])
async def test_the_message_with_a_large_request_that_has_ended_is_made_on_a_thread(
    url: str, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    on_loop: list[bool] = []

    def spy(epoch: int, log: RequestLog, command_id: int) -> scheduler_v1.SessionResponse:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return attached_message(epoch, log, command_id)

    monkeypatch.setattr("scheduler_svc.commands.attached_message", spy)
    log = request_log(n=2)
    given = packed(*[-0.5] * num_tokens)
    async with bench(url) as on:
        assert await on.store.put(log, on.journal.epoch) is None
        writes = [write_of(log, 0, range(10, 10 + num_tokens), index, logprobs=given) for index in range(2)]
        assert await on.store.write(WriteBatch(writes=writes, endings=[ending_of(log)]), on.journal.epoch) == []
        attached = (await on.attach(log.key)).attached
        assert [len(one.logprobs) for one in attached.sequences] == [num_tokens, num_tokens]
        assert on_loop == [num_tokens == 2]


async def test_the_message_with_a_record_is_made_on_a_thread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []

    def spy(epoch: int, log: RequestLog, command_id: int) -> scheduler_v1.SessionResponse:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return record_message(epoch, log, command_id)

    monkeypatch.setattr("scheduler_svc.record_commands.record_message", spy)
    log = request_log()
    async with bench(url) as on:
        assert await on.store.put(log, on.journal.epoch) is None
        batch = WriteBatch(writes=[write_of(log, 0, [10, 11])], endings=[ending_of(log)])
        assert await on.store.write(batch, on.journal.epoch) == []
        on.ask(lookup=scheduler_v1.Lookup(key=log.key, command_id=1))
        await until(lambda: 1 in on.answers)
        assert list(on.answers[1].record.attached.sequences[0].token_ids) == [10, 11]
        assert on_loop == [False]

"""Commands for requests that have ended or are unknown, while the store is behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from redis_server import redis_server
from request_logs import request_log
from scheduler_svc.commands import Commands
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.events import FailedEvent, Failure
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.live_state import Graces
from scheduler_svc.model_versions import ModelVersions
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.session_wire import attached_message, record_message
from scheduler_svc.spending import Spending
from scheduler_svc.store.base import Gap, KeyTaken, MalformedRecord, StoreUnavailable, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import ending_of, packed, write_of


class HeldUpStore(RedisStore):
    """A store whose writes by the journal wait until `goes_on` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        await self.goes_on.wait()
        return await super().write(batch, epoch)


class Gateway(GatewaySession):
    """Keeps the answers to its commands, by command id."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, scheduler_v1.Event] = {}

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        self.answers |= {event.command_id: event for event in message.events if event.command_id}


@dataclass(eq=False)
class Bench:
    """Commands over a core without replicas, and a gateway that sends them."""

    store: HeldUpStore
    core: Scheduler
    journal: Journal
    requests: LiveRequests
    commands: Commands
    gateway: Gateway

    @property
    def answers(self) -> dict[int, scheduler_v1.Event]:
        return self.gateway.answers

    def ask(
        self,
        **command: scheduler_v1.Submit
        | scheduler_v1.Attach
        | scheduler_v1.Cancel
        | scheduler_v1.Lookup
        | scheduler_v1.Delete,
    ) -> None:
        self.commands.take(scheduler_v1.SessionRequest(**command), self.gateway)  # type: ignore[arg-type]

    async def submit(self, submission_id: str, key: str = "k") -> scheduler_v1.Event:
        command_id = len(self.answers) + 1
        self.ask(
            submit=scheduler_v1.Submit(
                key=key,
                submission_id=submission_id,
                tenant="t",
                weight=1,
                prompt_token_ids=[1, 2],
                n=1,
                max_tokens=8,
                detachable=True,
                body_digest=b"body",
                command_id=command_id,
            )
        )
        await until(lambda: command_id in self.answers)
        return self.answers[command_id]

    async def attach(self, key: str = "k") -> scheduler_v1.Event:
        command_id = len(self.answers) + 1
        self.ask(attach=scheduler_v1.Attach(key=key, command_id=command_id))
        await until(lambda: command_id in self.answers)
        return self.answers[command_id]

    def cancel(self) -> None:
        self.ask(cancel=scheduler_v1.Cancel(key="k"))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(url: str, limits: SchedulerLimits | None = None, *, needs_store: bool = False) -> AsyncIterator[Bench]:
    store = HeldUpStore(url)
    epoch = await store.take_lease("bench", 60)
    assert epoch is not None
    core = Scheduler(limits or SchedulerLimits())
    journal = Journal(store, epoch, lambda: None, lambda log, index: None, Spending(Budgets()))
    requests = LiveRequests(ModelVersions(lambda: core, 60), journal, Graces())
    gateway = Gateway()
    commands = Commands(requests, store, journal, [gateway], RequestRates(store, "1"), needs_store=needs_store)
    running = asyncio.create_task(journal.run())
    try:
        yield Bench(store, core, journal, requests, commands, gateway)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as url:
        yield url


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


async def test_a_request_that_waits_is_recorded_again_where_the_store_has_lost_it(url: str) -> None:
    """Nothing of it changes meanwhile that would be written, and its client may have left."""
    async with bench(url) as on:
        accepted = (await on.submit("first")).accepted
        assert accepted.is_durable
        lose_everything(url)
        async with asyncio.timeout(60):
            while (record := await on.store.read("k")) is None:
                await asyncio.sleep(0.01)
        assert (record.submit.submission_id, record.state) == ("first", State.ACCEPTED)


async def test_a_request_that_was_taken_over_is_recorded_again_where_the_store_has_lost_it(url: str) -> None:
    async with bench(url) as before:
        await before.submit("first")
    async with bench(url) as on:
        for log in await on.store.live():
            on.requests.take_over(log)
        lose_everything(url)
        async with asyncio.timeout(60):
            while await on.store.read("k") is None:
                await asyncio.sleep(0.01)


def lose_everything(url: str) -> None:
    """Like a restart without the data."""
    with redis.Redis.from_url(url) as keys:
        keys.flushall()
        keys.script_flush()


async def test_a_cancelled_submission_that_is_repeated_is_not_run_again(url: str) -> None:
    async with bench(url) as on:
        await on.submit("first")
        on.store.goes_on.clear()
        on.cancel()
        assert (await on.submit("first")).failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        assert on.requests.get("k") is None


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


async def test_a_record_of_a_later_release_is_neither_resumed_nor_overwritten(url: str) -> None:
    async with bench(url) as on:
        await on.submit("first")
        assert await on.journal.flush(20)
    with redis.Redis.from_url(url) as keys:
        keys.hset("{quire}:request:k", "version", 99)
        async with bench(url) as after:
            for answer in (await after.attach(), await after.submit("second")):
                assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
                assert "a record of version 99" in answer.failed.message
            assert after.requests.get("k") is None
        assert keys.hget("{quire}:request:k", "version") == b"99"


UNRECORDED = scheduler_v1.Retention(is_unrecorded=True)


def unrecorded(**fields: object) -> scheduler_v1.Submit:
    known: dict[str, object] = {"key": "v", "submission_id": "v", "tenant": "t", "n": 1, "max_tokens": 8}
    known |= {"prompt_token_ids": [1, 2], "retention": UNRECORDED, "command_id": 7}
    return scheduler_v1.Submit(**(known | fields))  # type: ignore[arg-type]


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


def named(**fields: object) -> scheduler_v1.Submit:
    return unrecorded(key="k", submission_id="k", retention=None, detachable=True, **fields)


async def test_the_record_of_a_request_whose_tokens_do_not_fit_ends(url: str) -> None:
    """The store has lost its first tokens, and its gateway has later ones only."""
    beyond = scheduler_v1.UnflushedTokens(index=0, offset=4, token_ids=[7])
    async with bench(url) as on:
        on.ask(submit=named(was_accepted=True, unflushed=[beyond]))
        await until(lambda: 7 in on.answers)
        assert on.answers[7].failed.reason == scheduler_v1.FAILURE_REASON_DIVERGED
        assert await on.journal.flush(20)
        assert await on.store.live() == []
        record = await on.store.read("k")
        assert record is not None
        assert (record.state, record.failure) == (State.FAILED, scheduler_v1.FAILURE_REASON_DIVERGED)


def again(**fields: object) -> scheduler_v1.Submit:
    """The submission of `named` or `unrecorded`, by a gateway that was away meanwhile."""
    return unrecorded(detachable=True, was_accepted=True, **{"command_id": 8, **fields})


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


@pytest.mark.parametrize("was_known", [True, False])
async def test_a_request_without_a_record_that_was_cancelled_does_not_run_again(was_known: bool, url: str) -> None:
    async with bench(url) as on:
        if was_known:
            on.ask(submit=unrecorded(key="k", detachable=True))
            await until(lambda: 7 in on.answers)
        on.cancel()
        on.ask(submit=again(key="k"))
        assert on.answers[8].failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED


@pytest.mark.parametrize("broken", ["unflushed_tokens.merge", "commands.accepted_to_proto"])
async def test_the_record_of_a_request_that_cannot_be_started_ends(
    broken: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failed = 0

    def fail(*_: object) -> None:
        nonlocal num_failed
        num_failed += 1
        raise ValueError

    async with bench(url) as on:
        with monkeypatch.context() as patches:
            patches.setattr(f"scheduler_svc.{broken}", fail)
            on.ask(submit=named())
            await until(lambda: bool(num_failed and not on.commands._queues._tasks))
        assert not on.core.is_live("k")
        assert on.requests.get("k") is None
        assert await on.journal.flush(20)
        assert await on.store.live() == []


async def test_a_gateway_that_cannot_render_the_answer_is_refused_without_a_record(url: str) -> None:
    async with bench(url) as on:
        on.gateway.protocol = 1
        on.ask(submit=named(render_options=scheduler_v1.RenderOptions(echo=True)))
        assert on.answers[7].failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert await on.store.read("k") is None


@pytest.mark.parametrize("error", [StoreUnavailable("away"), MalformedRecord("malformed"), ValueError()], ids=repr)
async def test_a_request_that_cannot_be_recorded_does_not_count(
    error: Exception, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(*_: object) -> None:
        raise error

    account = scheduler_v1.AccountLimits(account="t/", requests_per_minute=1)
    async with bench(url, needs_store=True) as on:
        for command_id, is_refused in ((1, True), (2, True), (3, False), (4, True)):
            with monkeypatch.context() as patches:
                if command_id < 3:
                    patches.setattr(on.store, "put", put)
                submission = f"submission {command_id}"
                on.ask(submit=unrecorded(key=submission, retention=None, limits=account, command_id=command_id))
                await until(partial(on.answers.__contains__, command_id))
            assert on.answers[command_id].HasField("failed") is is_refused


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

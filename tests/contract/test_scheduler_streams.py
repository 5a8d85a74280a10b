"""The scheduler between its streams: real gRPC on both sides and a real Redis; only the model is a checksum."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import redis
from google.protobuf.duration_pb2 import Duration

from checksum_service import VOCAB, ChecksumService, serve
from memory_worker import continuation
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub, add_SchedulerServiceServicer_to_server
from quire.worker.v1 import worker_pb2 as worker_v1
from redis_server import redis_server
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.records import Records, RecordWriter
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.worker_link import WorkerPool
from svc_common.server import INNER_MESSAGE_BYTES, bind, create_server

PROMPT = list(range(10))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


class Deployment:
    """A scheduler with a session to it."""

    def __init__(self, engine: Engine, port: int) -> None:
        self.engine = engine
        self.port = port

    @asynccontextmanager
    async def session(self) -> AsyncIterator["SessionClient"]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            client = SessionClient(SchedulerServiceStub(channel).Session())
            try:
                yield client
            finally:
                client.call.cancel()


class SessionClient:
    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self.call = call
        self.epochs: list[int] = []
        self.status: scheduler_v1.Status | None = None
        self.events: list[scheduler_v1.Event] = []

    async def read(self) -> None:
        message = await asyncio.wait_for(self.call.read(), 10)
        assert isinstance(message, scheduler_v1.SessionResponse)
        self.epochs.append(message.epoch)
        if message.HasField("status"):
            self.status = message.status
        self.events += message.events

    async def ready(self) -> scheduler_v1.Model:
        while self.status is None or not self.status.HasField("model"):
            await self.read()
        return self.status.model

    async def submit(self, **changes: object) -> scheduler_v1.Submit:
        fields: dict[str, object] = {
            "key": uuid.uuid4().hex,
            "submission_id": uuid.uuid4().hex,
            "tenant": "default",
            "prompt_token_ids": PROMPT,
            "n": 1,
            "max_tokens": 8,
            "sampling": worker_v1.SamplingParams(seed=1),
        }
        submit = scheduler_v1.Submit(**(fields | changes))  # type: ignore[arg-type]
        await self.call.write(scheduler_v1.SessionRequest(submit=submit))
        return submit

    async def until(self, key: str, kind: str) -> scheduler_v1.Event:
        """The next event of a kind; for tokens, the one that ends a sequence."""
        while True:
            for event in self.events:
                done = event.WhichOneof("kind") == kind and (kind != "tokens" or event.tokens.HasField("end"))
                if event.key == key and done:
                    return event
            await self.read()

    def tokens(self, key: str) -> list[int]:
        parts = [event.tokens for event in self.events if event.key == key and event.HasField("tokens")]
        assert [part.offset for part in parts] == [sum(len(p.token_ids) for p in parts[:i]) for i in range(len(parts))]
        return [token for part in parts for token in part.token_ids]


@asynccontextmanager
async def deployment(redis_url: str, workers_at: list[str], grace: float = 30) -> AsyncIterator[Deployment]:
    records = Records(redis_url, ttl=600)
    writer = RecordWriter(records)
    engine = Engine(Scheduler(Limits(64, 16)), writer, grace)
    server = create_server(max_message_bytes=INNER_MESSAGE_BYTES)
    add_SchedulerServiceServicer_to_server(SchedulerServicer(engine, records), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    tasks = [
        asyncio.create_task(work)
        for work in (writer.run(), engine.watch_deadlines(), WorkerPool(engine, workers_at).run())
    ]
    try:
        yield Deployment(engine, port)
    finally:
        await server.stop(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await records.close()


@pytest.fixture
async def worker() -> AsyncIterator[tuple[ChecksumService, int]]:
    service = ChecksumService()
    server, port = await serve(service)
    yield service, port
    await server.stop(0)


@pytest.fixture
async def scheduler(redis_url: str, worker: tuple[ChecksumService, int]) -> AsyncIterator[Deployment]:
    async with deployment(redis_url, [f"127.0.0.1:{worker[1]}"]) as running:
        yield running


async def idle(engine: Engine) -> None:
    """Wait until no sequence runs, no step is in flight and no block is used."""
    for _ in range(500):
        replicas = engine.core.replicas
        if (
            not any(r.running or r.in_flight or r.device.pool.counts.used for r in replicas)
            and not engine.core.num_queued
        ):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the scheduler does not come to rest")


async def test_request_is_accepted_and_all_its_tokens_come(scheduler: Deployment) -> None:
    async with scheduler.session() as session:
        model = await session.ready()
        assert (model.name, model.context_length, model.vocab_size) == ("checksum", 256, VOCAB)
        submit = await session.submit(n=2)
        await session.until(submit.key, "accepted")
        ends: dict[int, scheduler_v1.SequenceEnd] = {}
        while len(ends) < 2:
            await session.read()
            ends = {e.tokens.index: e.tokens.end for e in session.events if e.tokens.HasField("end")}
        for index in range(2):
            tokens = [t for e in session.events if e.tokens.index == index for t in e.tokens.token_ids]
            assert tokens == continuation(PROMPT, 8, VOCAB)
            assert ends[index].WhichOneof("cause") == "length"
        assert set(session.epochs) == {scheduler.engine.epoch}
    await idle(scheduler.engine)


async def test_stop_token_is_named_at_the_end(scheduler: Deployment) -> None:
    expected = continuation(PROMPT, 8, VOCAB)
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit(stop_token_ids=[expected[3]])
        event = await session.until(submit.key, "tokens")
        assert event.tokens.end.stop_token_id == expected[3]
        assert session.tokens(submit.key) == expected[:4]


async def test_cancel_ends_a_request_on_any_session(scheduler: Deployment) -> None:
    async with scheduler.session() as session, scheduler.session() as other:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.until(submit.key, "accepted")
        await other.call.write(scheduler_v1.SessionRequest(cancel=scheduler_v1.Cancel(key=submit.key)))
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        await idle(scheduler.engine)


async def test_deadline_ends_a_request(scheduler: Deployment, worker: tuple[ChecksumService, int]) -> None:
    worker[0].gate.clear()
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit(time_left=Duration(nanos=50_000_000))
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED
    worker[0].gate.set()
    await idle(scheduler.engine)


async def test_broken_session_cancels_unnamed_requests_and_keeps_named_ones(
    scheduler: Deployment, worker: tuple[ChecksumService, int], redis_url: str
) -> None:
    worker[0].gate.clear()
    async with scheduler.session() as session:
        await session.ready()
        unnamed = await session.submit()
        named = await session.submit(detachable=True)
        await session.until(named.key, "accepted")
    while scheduler.engine.is_live(unnamed.key):
        await asyncio.sleep(0.01)
    assert scheduler.engine.is_live(named.key)
    worker[0].gate.set()
    await idle(scheduler.engine)
    assert not scheduler.engine.is_live(named.key)
    await asyncio.sleep(0)
    store = redis.Redis.from_url(redis_url)
    for submit, state in ((unnamed, b"cancelled"), (named, b"finished")):
        await has_state(store, submit.key, state)
    store.close()


async def has_state(store: "redis.Redis", key: str, state: bytes) -> None:
    for _ in range(500):
        if store.hget("{quire}:request:" + key, "state") == state:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"no record says {state!r}")


async def test_detached_request_is_cancelled_after_its_grace(
    redis_url: str, worker: tuple[ChecksumService, int]
) -> None:
    worker[0].gate.clear()
    async with deployment(redis_url, [f"127.0.0.1:{worker[1]}"], grace=0.05) as running:
        async with running.session() as session:
            await session.ready()
            submit = await session.submit(detachable=True)
            await session.until(submit.key, "accepted")
            await session.call.write(scheduler_v1.SessionRequest(detach=scheduler_v1.Detach(key=submit.key)))
            while running.engine.is_live(submit.key):
                await asyncio.sleep(0.01)
        worker[0].gate.set()
        await idle(running.engine)


async def test_record_is_there_from_acceptance_on_and_expires(scheduler: Deployment, redis_url: str) -> None:
    store = redis.Redis.from_url(redis_url)
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "accepted")
        name = "{quire}:request:" + submit.key
        recorded = store.hget(name, "submit")
        assert isinstance(recorded, bytes)
        assert scheduler_v1.Submit.FromString(recorded) == submit
        await session.until(submit.key, "tokens")
    await has_state(store, submit.key, b"finished")
    assert 0 < store.ttl(name) <= 600
    store.close()


async def test_repeated_submission_is_taken_once_and_another_under_its_key_is_refused(scheduler: Deployment) -> None:
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=100)
        await session.call.write(scheduler_v1.SessionRequest(submit=submit))
        await session.submit(key=submit.key)
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == continuation(PROMPT, 100, VOCAB)


async def test_key_of_a_finished_request_is_refused(scheduler: Deployment, redis_url: str) -> None:
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        store = redis.Redis.from_url(redis_url)
        await has_state(store, submit.key, b"finished")
        store.close()
        await session.submit(key=submit.key)
        event = await session.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE


async def test_requests_run_without_redis(worker: tuple[ChecksumService, int]) -> None:
    async with deployment("redis://127.0.0.1:1/0", [f"127.0.0.1:{worker[1]}"]) as running, running.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == continuation(PROMPT, 8, VOCAB)


async def test_failed_row_fails_its_request_alone(scheduler: Deployment, worker: tuple[ChecksumService, int]) -> None:
    async with scheduler.session() as session:
        await session.ready()
        worker[0].failing_token = 999
        bad, good = await session.submit(prompt_token_ids=[999, *PROMPT]), await session.submit()
        event = await session.until(bad.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_INTERNAL
        assert "told to fail" not in event.failed.message
        await session.until(good.key, "tokens")


async def test_worker_that_restarts_gets_its_sequences_anew(redis_url: str) -> None:
    service = ChecksumService()
    server, port = await serve(service)
    async with deployment(redis_url, [f"127.0.0.1:{port}"]) as running, running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=150)
        while len(session.tokens(submit.key)) < 20:
            await session.read()
        await server.stop(0)
        service = ChecksumService(epoch=running.engine.epoch + 10)
        server, _ = await serve(service, port)
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == continuation(PROMPT, 150, VOCAB)
        assert service.openings[0].epoch > service.about.epoch
        [new] = service.steps[0].new_sequences
        assert len(new.token_ids) > len(PROMPT)
        assert new.prompt_length == len(PROMPT)
    await server.stop(0)


async def test_two_workers_share_the_queue_and_a_different_model_is_refused(redis_url: str) -> None:
    services = [ChecksumService(), ChecksumService()]
    served = [await serve(service) for service in services]
    late, late_port = await serve(ChecksumService())
    await late.stop(0)
    addresses = [f"127.0.0.1:{port}" for port in (served[0][1], served[1][1], late_port)]
    async with deployment(redis_url, addresses) as running, running.session() as session:
        await session.ready()
        while len(running.engine.core.replicas) < 2:
            await asyncio.sleep(0.01)
        stranger = ChecksumService(fingerprint=b"another")
        served.append(await serve(stranger, late_port))
        while not stranger.openings:
            await asyncio.sleep(0.01)
        keys = [(await session.submit(max_tokens=60)).key for _ in range(20)]
        for key in keys:
            await session.until(key, "tokens")
            assert session.tokens(key) == continuation(PROMPT, 60, VOCAB)
        assert all(service.steps for service in services)
        assert not stranger.steps
    for server, _ in served:
        await server.stop(0)


async def test_stop_strings_pause_until_acknowledged_and_finish_cuts(scheduler: Deployment) -> None:
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200, has_stop_strings=True)
        while len(session.tokens(submit.key)) < 64:
            await session.read()
        acknowledge = scheduler_v1.Acknowledge(key=submit.key, index=0, num_tokens=30)
        await session.call.write(scheduler_v1.SessionRequest(acknowledge=acknowledge))
        while len(session.tokens(submit.key)) < 94:
            await session.read()
        finish = scheduler_v1.Finish(key=submit.key, index=0, num_tokens=80)
        await session.call.write(scheduler_v1.SessionRequest(finish=finish))
        await idle(scheduler.engine)
        assert not scheduler.engine.is_live(submit.key)


async def test_one_session_cannot_end_what_another_submitted(
    scheduler: Deployment, worker: tuple[ChecksumService, int]
) -> None:
    worker[0].gate.clear()
    async with scheduler.session() as session, scheduler.session() as other:
        await session.ready()
        submit = await session.submit(detachable=True, max_tokens=20)
        await session.until(submit.key, "accepted")
        refused = await other.submit(key=submit.key)
        for command in (
            scheduler_v1.SessionRequest(detach=scheduler_v1.Detach(key=submit.key)),
            scheduler_v1.SessionRequest(finish=scheduler_v1.Finish(key=submit.key, index=0, num_tokens=0)),
            scheduler_v1.SessionRequest(
                cancel=scheduler_v1.Cancel(key=submit.key, submission_id=refused.submission_id)
            ),
        ):
            await other.call.write(command)
        event = await other.until(submit.key, "failed")
        assert event.failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE
        marker = await other.submit(max_tokens=1)
        await other.until(marker.key, "accepted")  # the commands before it were taken
        worker[0].gate.set()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == continuation(PROMPT, 20, VOCAB)


async def test_slow_store_holds_up_its_request_and_nothing_else(
    scheduler: Deployment, worker: tuple[ChecksumService, int], redis_url: str
) -> None:
    worker[0].gate.clear()
    async with scheduler.session() as session:
        await session.ready()
        running = await session.submit(max_tokens=200)
        await session.until(running.key, "accepted")
        with redis.Redis.from_url(redis_url) as store:
            store.client_pause(700)
        waiting = await session.submit()
        await session.call.write(scheduler_v1.SessionRequest(cancel=scheduler_v1.Cancel(key=running.key)))
        await session.until(running.key, "failed")
        worker[0].gate.set()
        assert not any(event.key == waiting.key for event in session.events)
        await session.until(waiting.key, "tokens")


async def test_gateway_that_comes_back_during_the_acceptance_is_told_of_it(
    scheduler: Deployment, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as store:
        store.client_pause(700)
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit()
        marker = await session.submit(key=submit.key)
        await session.until(marker.key, "failed")  # so the first one is being accepted
    async with scheduler.session() as session:
        await session.call.write(scheduler_v1.SessionRequest(submit=submit))
        await session.until(submit.key, "accepted")
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == continuation(PROMPT, 8, VOCAB)


async def test_detached_request_does_not_wait_for_a_search_of_stop_strings(
    scheduler: Deployment, redis_url: str
) -> None:
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, has_stop_strings=True, max_tokens=150)
        await session.until(submit.key, "accepted")
    await idle(scheduler.engine)
    with redis.Redis.from_url(redis_url) as store:
        await has_state(store, submit.key, b"finished")


def test_core_imports_nothing_that_waits(tmp_path: Path) -> None:
    code = (
        "import sys, scheduler_svc.core.scheduler;"
        "sys.exit(bool({'grpc', 'asyncio', 'redis', 'torch', 'google.protobuf'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("change", [{"num_tokens": [1, 1]}, {"token_ids": [1, 2]}, {"sequence_ids": [99]}], ids=str)
async def test_an_answer_that_does_not_fit_its_step_costs_the_stream_and_no_request(
    change: dict[str, list[int]], scheduler: Deployment, worker: tuple[ChecksumService, int]
) -> None:
    worker[0].spoil = change
    async with scheduler.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == continuation(PROMPT, 8, VOCAB)
        assert len(worker[0].openings) == 2

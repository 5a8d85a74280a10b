"""A scheduler in the test's process: what its own program starts, before real gRPC and a real Redis."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

import grpc

from checksum_service import VOCAB, ChecksumService
from memory_worker import continuation
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub, add_SchedulerServiceServicer_to_server
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.engine import EngineSettings, SchedulerEngine
from scheduler_svc.leader import Leader
from scheduler_svc.live_requests import Graces
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import Write, WriteBatch
from scheduler_svc.store.redis import RedisStore
from svc_common.server import INTERNAL_MESSAGE_BYTES, bind, create_server

PROMPT = list(range(10))
Kind = Literal["accepted", "attached", "tokens", "failed"]
PATIENCE = 60  # seconds until a test is taken to hang


class Worker(ChecksumService):
    """A worker that listens."""

    port: int


class SessionClient:
    """A gateway's end of a session."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self.call = call
        self.epochs: list[int] = []
        self.status: scheduler_v1.Status | None = None
        self.events: list[scheduler_v1.Event] = []
        self.num_empty = 0
        self._attachments = 0

    async def read(self) -> None:
        """Take in the next message."""
        message = await self.call.read()
        assert isinstance(message, scheduler_v1.SessionResponse)
        self.epochs.append(message.epoch)
        if message.HasField("status"):
            self.status = message.status
        self.num_empty += not message.events and not message.HasField("status")
        self.events += message.events

    async def ready(self) -> scheduler_v1.Model:
        """The model, once there is one."""
        async with asyncio.timeout(PATIENCE):
            while self.status is None or not self.status.HasField("model"):
                await self.read()
        return self.status.model

    async def send(self, **command: object) -> None:
        """Send a command."""
        await self.call.write(scheduler_v1.SessionRequest(**command))  # type: ignore[arg-type]

    async def submit(self, **changes: object) -> scheduler_v1.Submit:
        """Submit a request."""
        submit = submit_of(**({"attachment_id": self._next()} | changes))
        await self.send(submit=submit)
        return submit

    async def attach(self, key: str, *unflushed: scheduler_v1.UnflushedTokens) -> scheduler_v1.Event:
        """Attach to a request; the answer, Attached or Failed."""
        attachment_id = self._next()
        await self.send(attach=scheduler_v1.Attach(key=key, attachment_id=attachment_id, unflushed=unflushed))
        return await self.answer(attachment_id)

    async def answer(self, attachment_id: int) -> scheduler_v1.Event:
        """What a Submit or an Attach was answered with."""
        return await self._first(lambda e: e.HasField("attachment_id") and e.attachment_id == attachment_id)

    async def until(self, key: str, kind: Kind) -> scheduler_v1.Event:
        """The next event of a kind; for tokens, the one that ends a sequence."""
        return await self._first(
            lambda e: e.key == key and e.HasField(kind) and (kind != "tokens" or e.tokens.HasField("end"))
        )

    async def _first(self, fits: Callable[[scheduler_v1.Event], bool]) -> scheduler_v1.Event:
        async with asyncio.timeout(PATIENCE):
            while (found := next(filter(fits, self.events), None)) is None:
                await self.read()
        return found

    async def until_tokens(self, key: str, count: int, index: int = 0) -> list[int]:
        """A sequence's tokens, once there are so many."""
        async with asyncio.timeout(PATIENCE):
            while len(tokens := self.tokens(key, index)) < count:
                await self.read()
        return tokens

    def tokens(self, key: str, index: int = 0) -> list[int]:
        """A sequence's tokens so far: what was attached to, and what came then, each without a hole."""
        parts: list[scheduler_v1.Tokens] = []
        for event in self.events:
            if event.key == key and event.HasField("attached"):
                parts = [part for part in event.attached.sequences if part.index == index]
            elif event.key == key and event.HasField("tokens") and event.tokens.index == index:
                parts.append(event.tokens)
        assert [part.offset for part in parts] == [sum(len(p.token_ids) for p in parts[:i]) for i in range(len(parts))]
        return [token for part in parts for token in part.token_ids]

    def kinds(self, key: str) -> list[str | None]:
        """The kinds of a request's events, without tokens and durable ones."""
        kinds = (event.WhichOneof("kind") for event in self.events if event.key == key)
        return [kind for kind in kinds if kind not in ("tokens", "durable")]

    async def end(self) -> grpc.StatusCode:
        """Read to the end of the session; its status."""
        try:
            while await asyncio.wait_for(self.call.read(), PATIENCE) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await self.call.code()

    def _next(self) -> int:
        self._attachments += 1
        return self._attachments


class Settings(SchedulerSettings):
    """Settings with values that the program does not let an operator set."""

    graces: Graces = Graces()

    @property
    def engine(self) -> EngineSettings:
        """The engine's settings."""
        return replace(super().engine, graces=replace(self.graces, detached=self.detach_grace))


class Deployment:
    """One scheduler, which may not lead yet."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.store = RedisStore(settings.redis_url, settings.record_ttl)
        self.servicer = SchedulerServicer()
        self.server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
        add_SchedulerServiceServicer_to_server(self.servicer, self.server)
        self.port = bind(self.server, settings.host, 0)
        self.leader = Leader(settings, self.store, uuid.uuid4().hex, self._on_lead)
        self.leads = asyncio.Event()
        self.engine: SchedulerEngine
        self.leading: asyncio.Task[None]

    async def _on_lead(self, engine: SchedulerEngine) -> None:
        self.engine = engine
        self.servicer.lead(engine)
        self.leads.set()

    async def start(self) -> None:
        """Listen, and wait to lead."""
        await self.server.start()
        self.leading = asyncio.create_task(self.leader.run())

    async def until_leading(self) -> None:
        """Wait until it leads."""
        await asyncio.wait_for(self.leads.wait(), PATIENCE)

    async def crash(self) -> None:
        """End it as a kill does: nothing is handed over, the lease runs out."""
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)
        await self.server.stop(0)
        await self.store.close()

    async def hand_over(self) -> None:
        """End it as SIGTERM does."""
        await self.leader.hand_over()
        self.servicer.resign()
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SessionClient]:
        """A session with it, which breaks at the end."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            client = SessionClient(SchedulerServiceStub(channel).Session())
            try:
                yield client
            finally:
                client.call.cancel()


@asynccontextmanager
async def candidate(redis_url: str, ports: Sequence[int], **settings: object) -> AsyncIterator[Deployment]:
    """A scheduler over the workers at these ports, which may have to wait until it leads."""
    workers_at = ",".join(f"127.0.0.1:{port}" for port in ports) or "127.0.0.1:1"
    known: dict[str, object] = {
        "workers_at": workers_at,
        "redis_url": redis_url,
        "max_step_tokens": 64,
        "max_sequences": 16,
        "lease_seconds": 2.0,  # a busy machine may keep a process from its renewal for tenths of a second
    }
    deployment = Deployment(Settings(**(known | settings)))  # type: ignore[arg-type]
    await deployment.start()
    try:
        yield deployment
    finally:
        await deployment.crash()


@asynccontextmanager
async def scheduler(redis_url: str, ports: Sequence[int], **settings: object) -> AsyncIterator[Deployment]:
    """A scheduler that leads; where another one did, that one's lease is taken to be over."""
    async with candidate(redis_url, ports, **settings) as deployment:
        await deployment.until_leading()
        yield deployment
        await deployment.hand_over()


def finish_of(submit: scheduler_v1.Submit, num_tokens: int, **changes: str) -> scheduler_v1.Finish:
    """A stop match in a request's first sequence."""
    fields = {"submission_id": submit.submission_id} | changes
    return scheduler_v1.Finish(key=submit.key, index=0, num_tokens=num_tokens, **fields)


def submit_of(**changes: object) -> scheduler_v1.Submit:
    """A request."""
    fields: dict[str, object] = {
        "key": uuid.uuid4().hex,
        "submission_id": uuid.uuid4().hex,
        "tenant": "default",
        "prompt_token_ids": PROMPT,
        "n": 1,
        "max_tokens": 8,
        "sampling": worker_v1.SamplingParams(seed=1),
        "body_digest": uuid.uuid4().bytes,
        "render_options": scheduler_v1.RenderOptions(request_id="mine", model="checksum", stops=["\n"]),
    }
    return scheduler_v1.Submit(**(fields | changes))  # type: ignore[arg-type]


async def left_behind(
    store: RedisStore, *known: list[int], fingerprint: bytes = b"", **changes: object
) -> scheduler_v1.Submit:
    """A request that a scheduler before this one has recorded, with so many tokens of each sequence."""
    submit = submit_of(**({"max_tokens": 20, "n": len(known)} | changes))
    epoch = await store.take_lease("before", 30)
    assert epoch is not None
    assert await store.put(RequestLog(submit, accepted_at=1.0, fingerprint=fingerprint), epoch) is None
    writes = [
        Write(submit.key, submit.submission_id, index, 0, token_ids)
        for index, token_ids in enumerate(known)
        if token_ids
    ]
    assert await store.write(WriteBatch(writes=writes), epoch) == []
    await store.release_lease("before")
    return submit


def expected(count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens that a sequence must have."""
    return continuation(list(prompt), count, VOCAB)


async def until_recorded(store: RedisStore, key: str, state: State) -> RequestLog:
    """A request's record, once it is in a state."""
    async with asyncio.timeout(PATIENCE):
        while (log := await store.read(key)) is None or log.state is not state:
            await asyncio.sleep(0.01)
    return log


async def until_over(engine: SchedulerEngine, key: str) -> None:
    """Wait until a request is not live any more."""
    async with asyncio.timeout(PATIENCE):
        while engine.is_live(key):
            await asyncio.sleep(0.01)


async def idle(engine: SchedulerEngine) -> None:
    """Wait until no sequence runs, no step is in flight and no block is used."""
    async with asyncio.timeout(PATIENCE):
        while any(model.core.num_queued for model in engine.models) or any(
            replica.running or replica.in_flight or replica.kv.device.counts.used for replica in engine.replicas
        ):
            await asyncio.sleep(0.01)

"""A scheduler in the test's process, with real gRPC and a real Redis, started as by its own program."""

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
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.sessions import SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import Write, WriteBatch
from scheduler_svc.store.redis import RedisStore
from scheduler_svc.term import PartFailed
from svc_common.server import INTERNAL_MESSAGE_BYTES, bind, create_server

PROMPT = list(range(10))
Kind = Literal["accepted", "attached", "tokens", "failed", "prompt_paid"]
TIMEOUT = 60  # seconds


class Worker(ChecksumService):
    """A worker that accepts connections."""

    port: int


class SessionClient:
    """The gateway's side of a session."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self.call = call
        self.epochs: list[int] = []
        self.status: scheduler_v1.Status | None = None
        self.events: list[scheduler_v1.Event] = []
        self.num_empty = 0
        self._attachments = 0

    async def read(self) -> None:
        """Reads the next message."""
        message = await self.call.read()
        assert isinstance(message, scheduler_v1.SessionResponse)
        self.epochs.append(message.epoch)
        if message.HasField("status"):
            self.status = message.status
        self.num_empty += not message.events and not message.HasField("status")
        self.events += message.events

    async def ready(self) -> scheduler_v1.Model:
        """Waits until a model is ready; returns it."""
        async with asyncio.timeout(TIMEOUT):
            while self.status is None or not self.status.HasField("model"):
                await self.read()
        return self.status.model

    async def send(self, **command: object) -> None:
        """Send a command."""
        await self.call.write(scheduler_v1.SessionRequest(**command))  # type: ignore[arg-type]

    async def submit(self, **changes: object) -> scheduler_v1.Submit:
        """Submit a request."""
        submit = submit_of(**({"command_id": self._next()} | changes))
        await self.send(submit=submit)
        return submit

    async def attach(
        self, key: str, *unflushed: scheduler_v1.UnflushedTokens, submission_id: str = ""
    ) -> scheduler_v1.Event:
        """Attaches to a request, or to one submission of it; returns the answer, Attached or Failed."""
        command_id = self._next()
        attach = scheduler_v1.Attach(key=key, command_id=command_id, unflushed=unflushed, submission_id=submission_id)
        await self.send(attach=attach)
        return await self.answer(command_id)

    async def look_up(self, key: str) -> scheduler_v1.Event:
        """Reads a request; returns the answer, Record or Failed."""
        command_id = self._next()
        await self.send(lookup=scheduler_v1.Lookup(key=key, command_id=command_id))
        return await self.answer(command_id)

    async def delete(self, key: str) -> scheduler_v1.Event:
        """Removes a request; returns the answer, Deleted or Failed."""
        command_id = self._next()
        await self.send(delete=scheduler_v1.Delete(key=key, command_id=command_id))
        return await self.answer(command_id)

    async def answer(self, command_id: int) -> scheduler_v1.Event:
        """The answer to a Submit or an Attach."""
        return await self._first(lambda e: e.HasField("command_id") and e.command_id == command_id)

    async def until(self, key: str, kind: Kind) -> scheduler_v1.Event:
        """The next event of a kind; for "tokens", the one that ends a sequence."""
        return await self._first(
            lambda e: e.key == key and e.HasField(kind) and (kind != "tokens" or e.tokens.HasField("end"))
        )

    async def _first(self, fits: Callable[[scheduler_v1.Event], bool]) -> scheduler_v1.Event:
        async with asyncio.timeout(TIMEOUT):
            while (found := next(filter(fits, self.events), None)) is None:
                await self.read()
        return found

    async def until_tokens(self, key: str, count: int, index: int = 0) -> list[int]:
        """Waits until a sequence has this many tokens; returns them."""
        async with asyncio.timeout(TIMEOUT):
            while len(tokens := self.tokens(key, index)) < count:
                await self.read()
        return tokens

    def tokens(self, key: str, index: int = 0) -> list[int]:
        """The tokens of a sequence so far, from Attached and later events. Asserts that there is no gap."""
        parts: list[scheduler_v1.Tokens] = []
        for event in self.events:
            if event.key == key and event.HasField("attached"):
                parts = [part for part in event.attached.sequences if part.index == index]
            elif event.key == key and event.HasField("tokens") and event.tokens.index == index:
                parts.append(event.tokens)
        assert [part.offset for part in parts] == [sum(len(p.token_ids) for p in parts[:i]) for i in range(len(parts))]
        return [token for part in parts for token in part.token_ids]

    def kinds(self, key: str) -> list[str | None]:
        """The kinds of a request's events, except for tokens and durable."""
        kinds = (event.WhichOneof("kind") for event in self.events if event.key == key)
        return [kind for kind in kinds if kind not in ("tokens", "durable")]

    async def end(self) -> grpc.StatusCode:
        """Read to the end of the session; its status."""
        try:
            while await asyncio.wait_for(self.call.read(), TIMEOUT) is not grpc.aio.EOF:
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
    """One scheduler, which may not be the leader yet."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.store = RedisStore(
            settings.redis_url.get_secret_value(),
            settings.record_ttl,
            settings.redis_prefix,
            settings.detach_grace,
            settings.redis_tls,
            settings.record_keys,
        )
        self.servicer = SchedulerServicer()
        self.server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
        add_SchedulerServiceServicer_to_server(self.servicer, self.server)
        self.port = bind(self.server, settings.host, 0)
        self.leader = Leader(settings, self.store, uuid.uuid4().hex, self._on_lead, self._on_resign)
        self.leads = asyncio.Event()
        self.engine: SchedulerEngine
        self.leading: asyncio.Task[None]

    async def _on_lead(self, engine: SchedulerEngine) -> None:
        self.engine = engine
        self.servicer.lead(engine)
        self.leads.set()

    async def _on_resign(self, error: PartFailed) -> None:
        self.servicer.resign()

    async def start(self) -> None:
        """Starts to listen and to wait for the lease."""
        await self.server.start()
        self.leading = asyncio.create_task(self.leader.run())

    async def until_leading(self) -> None:
        """Waits until it is the leader."""
        await asyncio.wait_for(self.leads.wait(), TIMEOUT)

    async def crash(self) -> None:
        """Ends it like SIGKILL: nothing is handed over, and the lease expires."""
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)
        await self.server.stop(0)
        await self.store.close()

    async def hand_over(self) -> None:
        """Ends it like SIGTERM."""
        await self.leader.hand_over()
        self.servicer.resign()
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SessionClient]:
        """A session with it, which is broken at the end of the block."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            client = SessionClient(SchedulerServiceStub(channel).Session())
            try:
                yield client
            finally:
                client.call.cancel()


@asynccontextmanager
async def candidate(redis_url: str, ports: Sequence[int], **settings: object) -> AsyncIterator[Deployment]:
    """A scheduler over the workers at these ports. It may have to wait for the lease."""
    workers_at = ",".join(f"127.0.0.1:{port}" for port in ports) or "127.0.0.1:1"
    known: dict[str, object] = {
        "workers_at": workers_at,
        "redis_url": redis_url,
        "max_step_tokens": 64,
        "max_sequences": 16,
        "lease_seconds": 2.0,  # on a busy machine a renewal may be late by tenths of a second
    }
    deployment = Deployment(Settings(**(known | settings)))  # type: ignore[arg-type]
    await deployment.start()
    try:
        yield deployment
    finally:
        await deployment.crash()


@asynccontextmanager
async def scheduler(redis_url: str, ports: Sequence[int], **settings: object) -> AsyncIterator[Deployment]:
    """A scheduler that leads. The lease of an earlier leader has expired."""
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
    """A request that an earlier scheduler has recorded, with this many tokens of each sequence."""
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
    """The expected tokens of a sequence."""
    return continuation(list(prompt), count, VOCAB)


async def until_recorded(store: RedisStore, key: str, state: State) -> RequestLog:
    """Waits until a request's record is in a state; returns the record."""
    async with asyncio.timeout(TIMEOUT):
        while (log := await store.read(key)) is None or log.state is not state:
            await asyncio.sleep(0.01)
    return log


async def until_over(engine: SchedulerEngine, key: str) -> None:
    """Waits until a request is no longer live."""
    async with asyncio.timeout(TIMEOUT):
        while engine.is_live(key):
            await asyncio.sleep(0.01)


async def idle(engine: SchedulerEngine) -> None:
    """Waits until no sequence runs, no step is in flight and no block is used."""
    async with asyncio.timeout(TIMEOUT):
        while any(model.core.num_queued for model in engine.models) or any(
            replica.running or replica.steps_in_flight or replica.kv.device.counts.used for replica in engine.replicas
        ):
            await asyncio.sleep(0.01)

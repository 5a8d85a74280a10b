"""A scheduler at the network's edge of a gateway's tests: real gRPC, with events that the test decides on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from quire.worker.v1 import worker_pb2 as worker_v1
from svc_common.server import INNER_MESSAGE_BYTES, bind, create_server

Script = Callable[["ScriptedSession", scheduler_v1.Submit], None]


class ScriptedSession:
    """The scheduler's end of one session stream."""

    def __init__(self, scheduler: "ScriptedScheduler") -> None:
        self._scheduler = scheduler
        self.outbox: asyncio.Queue[scheduler_v1.SessionResponse | None] = asyncio.Queue()

    def status(self, model: scheduler_v1.Model | None) -> None:
        """Tells which model is ready."""
        self.send(status=scheduler_v1.Status(model=model))

    def accept(self, key: str) -> None:
        """Accepts a request."""
        self.send([scheduler_v1.Event(key=key, accepted=scheduler_v1.Accepted())])

    def fail(
        self,
        key: str,
        reason: scheduler_v1.FailureReason,
        message: str = "",
        retry_after: Duration | None = None,
    ) -> None:
        """Ends a request."""
        failed = scheduler_v1.Failed(reason=reason, message=message, retry_after=retry_after)
        self.send([scheduler_v1.Event(key=key, failed=failed)])

    def tokens(self, key: str, token_ids: Sequence[int], offset: int, index: int = 0, **more: Any) -> None:
        """Grows a sequence; `more` holds further fields of Tokens."""
        tokens = scheduler_v1.Tokens(index=index, offset=offset, token_ids=token_ids, **more)
        self.send([scheduler_v1.Event(key=key, tokens=tokens)])

    def send(
        self,
        events: Sequence[scheduler_v1.Event] = (),
        status: scheduler_v1.Status | None = None,
        epoch: int | None = None,
    ) -> None:
        """Sends one message, of the scheduler's epoch unless told otherwise."""
        epoch = self._scheduler.epoch if epoch is None else epoch
        self.outbox.put_nowait(scheduler_v1.SessionResponse(epoch=epoch, events=events, status=status))

    def close(self) -> None:
        """Ends the stream."""
        self.outbox.put_nowait(None)


class ScriptedScheduler(SchedulerServiceServicer):
    """Notes all commands; plays `script` for each submission."""

    def __init__(self, model: scheduler_v1.Model | None, epoch: int = 1) -> None:
        self.model = model
        self.epoch = epoch
        self.script: Script = lambda session, submit: None
        self.sessions: list[ScriptedSession] = []
        self.commands: list[scheduler_v1.SessionRequest] = []
        self.address = ""
        self._num_awaited: dict[str, int] = {}
        self._changed = asyncio.Condition()

    @property
    def session(self) -> ScriptedSession:
        """The latest session."""
        return self.sessions[-1]

    async def next(self, kind: str) -> Any:
        """Waits for the next command of a kind, in the order of their coming, and returns it."""
        place = self._num_awaited[kind] = self._num_awaited.get(kind, 0) + 1
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self.all(kind)) >= place)
        return self.all(kind)[place - 1]

    def all(self, kind: str) -> list[Any]:
        """All commands of a kind that came."""
        return [getattr(command, kind) for command in self.commands if command.WhichOneof("command") == kind]

    async def joined(self, num_sessions: int) -> None:
        """Waits until so many sessions have begun."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self.sessions) >= num_sessions)

    async def Session(
        self, requests: AsyncIterator[scheduler_v1.SessionRequest], context: Any
    ) -> AsyncIterator[scheduler_v1.SessionResponse]:
        """One gateway's session."""
        session = ScriptedSession(self)
        session.status(self.model)
        async with self._changed:
            self.sessions.append(session)
            self._changed.notify_all()
        reader = asyncio.create_task(self._read(session, requests))
        try:
            while (response := await session.outbox.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _read(self, session: ScriptedSession, requests: AsyncIterator[scheduler_v1.SessionRequest]) -> None:
        async for request in requests:
            async with self._changed:
                self.commands.append(request)
                self._changed.notify_all()
            if request.WhichOneof("command") == "submit":
                self.script(session, request.submit)


@asynccontextmanager
async def serving(scheduler: ScriptedScheduler, port: int = 0) -> AsyncIterator[ScriptedScheduler]:
    """Serves it at `scheduler.address`."""
    server = create_server(max_message_bytes=INNER_MESSAGE_BYTES)
    add_SchedulerServiceServicer_to_server(scheduler, server)
    scheduler.address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
    await server.start()
    try:
        yield scheduler
    finally:
        await server.stop(None)


def length_end() -> scheduler_v1.SequenceEnd:
    """The end of a sequence that has max_tokens."""
    return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())


def stop_end(token_id: int) -> scheduler_v1.SequenceEnd:
    """The end of a sequence that drew a stop token."""
    return scheduler_v1.SequenceEnd(stop_token_id=token_id)


def answer_with(*outputs: Sequence[int], stop_token_id: int | None = None, cached_tokens: int = 0) -> Script:
    """Answers every submission: sequence i gets outputs[i], or the last of them, cut at max_tokens, a token a step.

    With `stop_token_id` that token follows the output and ends it.
    """

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        plans = []
        for index in range(submit.n):
            token_ids = list(outputs[min(index, len(outputs) - 1)])
            if stop_token_id is not None:
                token_ids.append(stop_token_id)
            plans.append(token_ids[: submit.max_tokens])
        for offset in range(max(map(len, plans))):
            events = []
            for index, token_ids in enumerate(plans):
                if offset >= len(token_ids):
                    continue
                end = None
                if offset == len(token_ids) - 1:
                    stopped = token_ids[offset] in submit.stop_token_ids
                    end = stop_end(token_ids[offset]) if stopped else length_end()
                tokens = scheduler_v1.Tokens(
                    index=index,
                    offset=offset,
                    token_ids=[token_ids[offset]],
                    logprobs=_logprobs(submit, token_ids[offset]),
                    cached_tokens=cached_tokens if offset == 0 else None,
                    end=end,
                )
                events.append(scheduler_v1.Event(key=submit.key, tokens=tokens))
            session.send(events)

    return script


def _logprobs(submit: scheduler_v1.Submit, token_id: int) -> list[worker_v1.TokenLogprobs]:
    """The token itself at -0.5, then its neighbours at -1, -2 and so on."""
    if not submit.sampling.HasField("logprobs"):
        return []
    top = [
        worker_v1.Logprob(token_id=token_id + place, logprob=-0.5 if place == 0 else -place)
        for place in range(submit.sampling.logprobs)
    ]
    return [worker_v1.TokenLogprobs(logprob=-0.5, top=top)]

"""A scripted scheduler for tests of gateways: real gRPC, with events that the test chooses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from quire.worker.v1 import worker_pb2 as worker_v1
from svc_common.errors import QuireError, Reason
from svc_common.protocols import SESSION_PROTOCOLS, ProtocolRange
from svc_common.server import INTERNAL_MESSAGE_BYTES, bind, create_server

Script = Callable[["ScriptedSession", scheduler_v1.Submit], None]
AttachScript = Callable[["ScriptedSession", scheduler_v1.Attach], None]

_HEARTBEAT_SECONDS = 0.5


class ScriptedSession:
    """The scheduler's side of one session stream."""

    def __init__(self, scheduler: "ScriptedScheduler") -> None:
        self._scheduler = scheduler
        self.asked: dict[str, int] = {}
        """The id of each key's unanswered command."""
        self.is_mute = False
        self.outbox: asyncio.Queue[scheduler_v1.SessionResponse | None] = asyncio.Queue()

    def status(
        self, *models: scheduler_v1.Model | None, is_store_degraded: bool = False, num_workers_set_apart: int = 0
    ) -> None:
        """Sends the ready models; None stands for no model."""
        ready = [model for model in models if model is not None]
        status = scheduler_v1.Status(
            model=ready[0] if ready else None,
            is_store_degraded=is_store_degraded,
            num_workers_set_apart=num_workers_set_apart,
        )
        protocols = self._scheduler.protocols
        if protocols is not None:
            status.models.extend(ready)
            status.oldest_protocol, status.newest_protocol = protocols.oldest, protocols.newest
        self.send(status=status)

    def accept(self, key: str, is_durable: bool = True) -> None:
        """Accepts a request."""
        accepted = scheduler_v1.Accepted(is_durable=is_durable)
        self.send([scheduler_v1.Event(key=key, accepted=accepted, command_id=self.asked.pop(key))])

    def attached(
        self,
        submit: scheduler_v1.Submit,
        *sequences: scheduler_v1.Tokens,
        is_durable: bool | None = None,
        prompt_logprobs: Sequence[worker_v1.TokenLogprobs] = (),
    ) -> None:
        """Attaches a gateway to a request with these sequences, and these first log-probabilities of its prompt."""
        attached = attached_of(submit, *sequences, is_durable=is_durable, prompt_logprobs=prompt_logprobs)
        self.send([scheduler_v1.Event(key=submit.key, attached=attached, command_id=self.asked.pop(submit.key))])

    def answer(self, key: str, command_id: int, **kind: Any) -> None:
        """Answers a look-up or a deletion; without a `kind`, that there is no such request."""
        kind = kind or {"failed": scheduler_v1.Failed(reason=scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST)}
        self.send([scheduler_v1.Event(key=key, command_id=command_id, **kind)])

    def durable(self, key: str, num_tokens: int, index: int = 0) -> None:
        """Sends the number of durable tokens of a sequence."""
        self.send([scheduler_v1.Event(key=key, durable=scheduler_v1.Durable(index=index, num_tokens=num_tokens))])

    def fail(
        self,
        key: str,
        reason: scheduler_v1.FailureReason,
        message: str = "",
        retry_after: Duration | None = None,
    ) -> None:
        """Fails the unanswered command of a key, or else the request."""
        failed = scheduler_v1.Failed(reason=reason, message=message, retry_after=retry_after)
        self.send([scheduler_v1.Event(key=key, failed=failed, command_id=self.asked.pop(key, None))])

    def tokens(self, key: str, token_ids: Sequence[int], offset: int, index: int = 0, **more: Any) -> None:
        """Sends tokens of a sequence; `more` has further fields of Tokens."""
        tokens = scheduler_v1.Tokens(index=index, offset=offset, token_ids=token_ids, **more)
        self.send([scheduler_v1.Event(key=key, tokens=tokens)])

    def send(
        self,
        events: Sequence[scheduler_v1.Event] = (),
        status: scheduler_v1.Status | None = None,
        epoch: int | None = None,
    ) -> None:
        """Sends one message, by default of the scheduler's epoch."""
        epoch = self._scheduler.epoch if epoch is None else epoch
        self.outbox.put_nowait(scheduler_v1.SessionResponse(epoch=epoch, events=events, status=status))

    def close(self) -> None:
        """Ends the stream."""
        self.outbox.put_nowait(None)


class ScriptedScheduler(SchedulerServiceServicer):
    """Records all commands; runs `script` for each Submit and `attach_script` for each Attach. With `is_leader` unset
    it accepts no sessions."""

    def __init__(
        self,
        *models: scheduler_v1.Model | None,
        epoch: int = 1,
        protocols: ProtocolRange | None = SESSION_PROTOCOLS,
    ) -> None:
        """Sends to each session that these models are ready. With `protocols` None the status is that of protocol 1:
        one model and no range."""
        self.models = models
        self.protocols = protocols
        self.is_leader = True
        self.epoch = epoch
        self.script: Script
        self.attach_script: AttachScript
        self.records: dict[str, scheduler_v1.Record] = {}
        """What look-ups find, by key; deletions remove it."""
        self.sessions: list[ScriptedSession] = []
        self.commands: list[scheduler_v1.SessionRequest] = []
        self.num_messages = 0
        """Messages of all sessions; one may have several commands."""
        self.address = ""
        self._num_refused = 0
        self._num_awaited: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self.reset()

    def reset(self) -> None:
        """Forgets the commands and the scripts."""
        self.script = lambda session, submit: None
        self.attach_script = lambda session, attach: None
        self.records.clear()
        self.commands.clear()
        self._num_awaited.clear()

    @property
    def model(self) -> scheduler_v1.Model | None:
        """The first of its models."""
        return self.models[0] if self.models else None

    @property
    def session(self) -> ScriptedSession:
        """The latest session."""
        return self.sessions[-1]

    async def next(self, kind: str) -> Any:
        """Waits for the next command of a kind, in order of arrival, and returns it."""
        place = self._num_awaited[kind] = self._num_awaited.get(kind, 0) + 1
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: len(self.all(kind)) >= place)
        return self.all(kind)[place - 1]

    def all(self, kind: str) -> list[Any]:
        """All commands of a kind so far."""
        return [getattr(command, kind) for command in self.commands if command.WhichOneof("command") == kind]

    async def joined(self, num_sessions: int) -> None:
        """Waits until this many sessions have begun."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: len(self.sessions) >= num_sessions)

    async def lost(self) -> None:
        """Breaks its sessions, accepts no new ones, and waits until their gateways have noticed."""
        self.is_leader = False
        num_refused = self._num_refused
        for session in self.sessions:
            session.close()
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self._num_refused > num_refused)

    async def Session(
        self, requests: AsyncIterator[scheduler_v1.SessionRequest], context: Any
    ) -> AsyncIterator[scheduler_v1.SessionResponse]:
        """One gateway's session."""
        if not self.is_leader:
            async with self._changed:
                self._num_refused += 1
                self._changed.notify_all()
            raise QuireError(Reason.NOT_LEADER, "this scheduler does not lead")
        session = ScriptedSession(self)
        session.status(*self.models)
        async with self._changed:
            self.sessions.append(session)
            self._changed.notify_all()
        reader = asyncio.create_task(self._read(session, requests))
        try:
            while True:
                try:
                    async with asyncio.timeout(_HEARTBEAT_SECONDS):
                        response = await session.outbox.get()
                except TimeoutError:
                    response = scheduler_v1.SessionResponse(epoch=self.epoch)
                if response is None:
                    break
                if not session.is_mute:
                    yield response
        finally:
            reader.cancel()

    async def _read(self, session: ScriptedSession, requests: AsyncIterator[scheduler_v1.SessionRequest]) -> None:
        async for request in requests:
            self.num_messages += 1
            for command in request.batch.commands if request.HasField("batch") else (request,):
                await self._take(session, command)

    async def _take(self, session: ScriptedSession, request: scheduler_v1.SessionRequest) -> None:
        """One command."""
        match request.WhichOneof("command"):
            case "submit":
                session.asked[request.submit.key] = request.submit.command_id
            case "attach":
                session.asked[request.attach.key] = request.attach.command_id
        async with self._changed:
            self.commands.append(request)
            self._changed.notify_all()
        match request.WhichOneof("command"):
            case "submit":
                self.script(session, request.submit)
            case "attach":
                self.attach_script(session, request.attach)
            case "lookup":
                found = {"record": self.records[request.lookup.key]} if request.lookup.key in self.records else {}
                session.answer(request.lookup.key, request.lookup.command_id, **found)
            case "delete":
                was_there = self.records.pop(request.delete.key, None) is not None
                deleted = {"deleted": scheduler_v1.Deleted()} if was_there else {}
                session.answer(request.delete.key, request.delete.command_id, **deleted)


@asynccontextmanager
async def serving(scheduler: ScriptedScheduler, port: int = 0) -> AsyncIterator[ScriptedScheduler]:
    """Serves it at `scheduler.address`."""
    server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
    add_SchedulerServiceServicer_to_server(scheduler, server)
    scheduler.address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
    await server.start()
    try:
        yield scheduler
    finally:
        await server.stop(None)


def attached_of(
    submit: scheduler_v1.Submit,
    *sequences: scheduler_v1.Tokens,
    is_durable: bool | None = None,
    prompt_logprobs: Sequence[worker_v1.TokenLogprobs] = (),
) -> scheduler_v1.Attached:
    """A request with these sequences, and these first log-probabilities of its prompt."""
    options = submit.render_options
    returns_prompt = options.echo or options.HasField("prompt_logprobs")
    return scheduler_v1.Attached(
        render_options=submit.render_options,
        prompt_length=len(submit.prompt_token_ids),
        sequences=sequences,
        submission_id=submit.submission_id,
        detachable=submit.detachable,
        seed=submit.sampling.seed,
        num_sequences=submit.n,
        tokenizer_fingerprint=submit.tokenizer_fingerprint,
        is_durable=is_durable,
        retention=submit.retention if submit.HasField("retention") else None,
        prompt_logprobs=scheduler_v1.PromptLogprobs(offset=1, tokens=prompt_logprobs) if prompt_logprobs else None,
        prompt_token_ids=submit.prompt_token_ids if returns_prompt else (),
    )


def length_end() -> scheduler_v1.SequenceEnd:
    """The end of a sequence that has max_tokens."""
    return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())


def cut_end() -> scheduler_v1.SequenceEnd:
    """The end of a sequence in which a gateway found a stop string."""
    return scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())


def stop_end(token_id: int) -> scheduler_v1.SequenceEnd:
    """The end of a sequence by a stop token."""
    return scheduler_v1.SequenceEnd(stop_token_id=token_id)


def value_end(*numbers: float) -> scheduler_v1.SequenceEnd:
    """The end of a sequence that has a value and no tokens."""
    return scheduler_v1.SequenceEnd(value=worker_v1.PromptValue(numbers=numbers))


def embed_with(vector: Callable[[Sequence[int]], Sequence[float]], cached_tokens: int = 0) -> Script:
    """Answers every submission with the vector of its prompt, cut to its dimensions."""

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        numbers = vector(submit.prompt_token_ids)
        end = value_end(*numbers[: submit.result.embedding.num_dimensions or None])
        session.tokens(submit.key, (), 0, end=end, cached_tokens=cached_tokens)

    return script


def answer_with(*outputs: Sequence[int], stop_token_id: int | None = None, cached_tokens: int = 0) -> Script:
    """Answers every submission: sequence i gets outputs[i], or the last of them, truncated to max_tokens, one token per
    step.

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

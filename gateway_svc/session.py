"""The client of a scheduler's session stream: keeps one stream up, with whichever scheduler leads."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from gateway_svc import refusals
from gateway_svc.generation import ModelFacts
from gateway_svc.route import Reader
from gateway_svc.routes import Attachment, Routes
from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from svc_common.channels import end_if_cancelled, inner_channel
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

_DIAL_SECONDS = 2.0
_SUBMIT_PATIENCE_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 0.5
# A scheduler says something every half second. A process that was held up itself counts that as one silence, however
# long it was, and so does not leave a scheduler whose words wait to be read.
_LISTEN_SECONDS = 0.5
_MAX_SILENCES = 5

_Call: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]"


@dataclass(frozen=True, slots=True)
class _Line:
    """A stream to a scheduler that has spoken."""

    address: str
    channel: grpc.aio.Channel
    call: _Call
    first: scheduler_pb2.SessionResponse


class SchedulerSession:
    """One gateway's session with the scheduler that leads.

    `model` is what requests can be submitted for, or None; it outlasts a session by as long as a request would wait for
    the next one. What was submitted stays in the session's care over reconnections, until its readers leave.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        name: str,
        fingerprint: bytes,
        on_change: Callable[[], None],
        patience: float = 60.0,
    ) -> None:
        """`name` and `fingerprint` are those of the model whose tokenizer this gateway holds; `patience` is how many
        seconds accepted requests wait without a scheduler."""
        self._addresses = addresses
        self._name = name
        self._fingerprint = fingerprint
        self._on_change = on_change
        self._patience = patience
        self._outbox: asyncio.Queue[scheduler_pb2.SessionRequest] | None = None
        self._routes = Routes(self._send, patience)
        self._epoch = 0
        self._has_heard = False
        self._until_unready = _Countdown(self._give_up_waiting)
        self._until_given_up = _Countdown(self._give_up)
        self.model: ModelFacts | None = None
        self.is_store_degraded = False

    # Commands.

    def ask(self, key: str, submit: scheduler_pb2.Submit | None, reader: Reader, deadline: float | None) -> Attachment:
        """Lets a reader take part in a request: the one that `submit` asks for or, with None, one that must be there.

        `deadline` is on the monotonic clock, in seconds. Raises QuireError where no model is ready, or nobody can be
        asked.
        """
        if self.model is None and (submit is not None or self._outbox is None):
            retry_after = refusals.RETRY_AFTER_SECONDS
            raise QuireError(Reason.MODEL_NOT_READY, "the model is not ready", retry_after=retry_after)
        return self._routes.ask(key, submit, reader, deadline)

    def cancel(self, key: str) -> None:
        """Ends a request, here or on any other gateway; readers here are told.

        Raises QuireError where no scheduler can be told of a request that is not ours.
        """
        if not self._routes.cancel(key):
            raise refusals.unavailable("no scheduler can be reached")

    def _send(self, request: scheduler_pb2.SessionRequest) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(request)

    # The stream.

    async def run(self) -> None:
        """Keeps a session up until cancelled."""
        while True:
            line = await self._reach_any()
            try:
                await self._hold(line)
            finally:
                await line.channel.close()
            end_if_cancelled()
            # Jitter keeps gateways that lost the same scheduler from returning all at once.
            await asyncio.sleep(_FIRST_BACKOFF_SECONDS * random.uniform(0.0, 1.0))

    async def _reach_any(self) -> _Line:
        """The first scheduler that takes a session. All are dialled at once: one that is stopped says nothing at all,
        and would hold up the search for whoever took over from it."""
        dials = [asyncio.create_task(self._reach(address)) for address in self._addresses]
        line = None
        try:
            done, _ = await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
            line = done.pop().result()
            return line
        finally:
            for dial in dials:
                dial.cancel()
            for other in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(other, _Line) and other is not line:
                    await other.channel.close()

    async def _reach(self, address: str) -> _Line:
        """Dials one scheduler until it takes a session."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            async with contextlib.AsyncExitStack() as stack:
                channel = await stack.enter_async_context(inner_channel(address))
                call: _Call = SchedulerServiceStub(channel).Session()
                try:
                    async with asyncio.timeout(_DIAL_SECONDS):
                        first = await call.read()
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "TIMEOUT"
                    logger.debug("no answer from a scheduler", extra={"scheduler": address, "code": code})
                else:
                    if isinstance(first, scheduler_pb2.SessionResponse):
                        if first.epoch >= self._epoch:
                            stack.pop_all()
                            return _Line(address, channel, call, first)
                        extra = {"scheduler": address, "epoch": first.epoch, "known_epoch": self._epoch}
                        logger.warning("a scheduler of an older term was left", extra=extra)
            end_if_cancelled()
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def _hold(self, line: _Line) -> None:
        """One session, to its end."""
        extra = {"scheduler": line.address, "epoch": line.first.epoch}
        logger.info("session opened", extra=extra)
        self._outbox = asyncio.Queue()
        self._opened()
        writer = asyncio.create_task(_write(line.call, self._outbox))
        why = "the scheduler ended it"
        response: object = line.first
        try:
            async with asyncio.timeout(None) as limit:
                listener = asyncio.create_task(self._listen(limit))
                try:
                    while isinstance(response, scheduler_pb2.SessionResponse):
                        self._take(response)
                        response = await line.call.read()
                finally:
                    listener.cancel()
        except grpc.aio.AioRpcError as error:
            why = error.code().name
        except TimeoutError:
            why = "the scheduler was silent"
        finally:
            writer.cancel()
            self._outbox = None
            self._lost()
        logger.warning("session lost", extra={**extra, "why": why})

    async def _listen(self, limit: asyncio.Timeout) -> None:
        """Ends a session whose scheduler says nothing."""
        num_silences = 0
        while num_silences < _MAX_SILENCES:
            self._has_heard = False
            await asyncio.sleep(_LISTEN_SECONDS)
            num_silences = 0 if self._has_heard else num_silences + 1
        limit.reschedule(asyncio.get_running_loop().time())

    def _take(self, response: scheduler_pb2.SessionResponse) -> None:
        self._has_heard = True
        if response.epoch < self._epoch:
            return
        self._epoch = response.epoch
        if response.HasField("status"):
            self._take_status(response.status)
        take = self._routes.take
        for event in response.events:
            take(event)

    # What can be served.

    def _take_status(self, status: scheduler_pb2.Status) -> None:
        self.is_store_degraded = status.is_store_degraded
        self._set_model(self._checked(status))
        self._routes.take_submissions(self.model is not None)

    def _checked(self, status: scheduler_pb2.Status) -> ModelFacts | None:
        """The model of a status, if it is the one that this gateway can serve."""
        if not status.HasField("model"):
            return None
        model = status.model
        if model.tokenizer_fingerprint != self._fingerprint or model.name != self._name:
            logger.error(
                "the scheduler serves another model than this gateway has the tokenizer of",
                extra={
                    "model": self._name,
                    "scheduler_model": model.name,
                    "tokenizer_fingerprint": self._fingerprint.hex(),
                    "scheduler_tokenizer_fingerprint": model.tokenizer_fingerprint.hex(),
                },
            )
            return None
        return ModelFacts.from_proto(model)

    def _set_model(self, model: ModelFacts | None) -> None:
        if model is None:
            self._until_unready.start(_SUBMIT_PATIENCE_SECONDS)
        else:
            self._until_unready.stop()
        if model != self.model:
            self.model = model
            self._on_change()

    def _opened(self) -> None:
        self._until_given_up.stop()
        self._routes.open()

    def _lost(self) -> None:
        """The stream broke. Requests wait for the next one: those that run, and those that come meanwhile."""
        self._routes.close()
        self._until_unready.start(_SUBMIT_PATIENCE_SECONDS)
        self._until_given_up.start(self._patience)

    def _give_up_waiting(self) -> None:
        if self.model is not None:
            self.model = None
            self._on_change()
        self._routes.give_up_waiting(refusals.unavailable("no scheduler can run the request"))

    def _give_up(self) -> None:
        self._routes.give_up(refusals.unavailable("the connection to the scheduler was lost"))


class _Countdown:
    """Does something, once, unless it is stopped before its time is over."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Begins, where it has not begun."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def stop(self) -> None:
        """Ends it early."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._action()


async def _write(call: _Call, outbox: asyncio.Queue[scheduler_pb2.SessionRequest]) -> None:
    # A call that is over is the reader's to tell why.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.get())

"""The client of a scheduler's session stream: keeps one stream up, with whichever scheduler leads."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from gateway_svc import request_errors
from gateway_svc.subscription import RequestObserver
from gateway_svc.subscriptions import Attachment, Subscriptions
from gateway_svc.validated_request import ModelInfo
from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from svc_common.channels import end_if_cancelled, internal_channel
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

_DIAL_SECONDS = 2.0
_SUBMIT_TIMEOUT_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 0.5
# A scheduler says something every half second. A process that was held up itself counts that as one silence, however
# long it was, and so does not leave a scheduler whose words wait to be read.
_HEARTBEAT_CHECK_SECONDS = 0.5
_MAX_MISSED_HEARTBEATS = 5

_Call: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]"


@dataclass(frozen=True, slots=True)
class _SchedulerConnection:
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
        reconnect_timeout: float = 60.0,
    ) -> None:
        """`name` and `fingerprint` are those of the model whose tokenizer this gateway holds; `reconnect_timeout` is
        how many
        seconds accepted requests wait without a scheduler."""
        self._addresses = addresses
        self._name = name
        self._fingerprint = fingerprint
        self._on_change = on_change
        self._reconnect_timeout = reconnect_timeout
        self._outbox: asyncio.Queue[scheduler_pb2.SessionRequest] | None = None
        self._subscriptions = Subscriptions(self._send, reconnect_timeout)
        self._epoch = 0
        self._has_received = False
        self._unready_timer = _OneShotTimer(self._give_up_waiting)
        self._give_up_timer = _OneShotTimer(self._give_up)
        self.model: ModelInfo | None = None
        self.is_store_degraded = False

    # Commands.

    def subscribe(
        self, key: str, submit: scheduler_pb2.Submit | None, observer: RequestObserver, deadline: float | None
    ) -> Attachment:
        """Lets a reader take part in a request: the one that `submit` asks for or, with None, one that must be there.

        `deadline` is on the monotonic clock, in seconds. Raises QuireError where no model is ready, or nobody can be
        asked.
        """
        if self.model is None and (submit is not None or self._outbox is None):
            retry_after = request_errors.RETRY_AFTER_SECONDS
            raise QuireError(Reason.MODEL_NOT_READY, "the model is not ready", retry_after=retry_after)
        return self._subscriptions.subscribe(key, submit, observer, deadline)

    def cancel(self, key: str) -> None:
        """Ends a request, here or on any other gateway; readers here are told.

        Raises QuireError where no scheduler can be told of a request that is not ours.
        """
        if not self._subscriptions.cancel(key):
            raise request_errors.unavailable("no scheduler can be reached")

    def _send(self, request: scheduler_pb2.SessionRequest) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(request)

    # The stream.

    async def run(self) -> None:
        """Keeps a session up until cancelled."""
        while True:
            connection = await self._connect_any()
            try:
                await self._run_session(connection)
            finally:
                await connection.channel.close()
            end_if_cancelled()
            # Jitter keeps gateways that lost the same scheduler from returning all at once.
            await asyncio.sleep(_FIRST_BACKOFF_SECONDS * random.uniform(0.0, 1.0))

    async def _connect_any(self) -> _SchedulerConnection:
        """The first scheduler that takes a session. All are dialled at once: one that is stopped says nothing at all,
        and would hold up the search for whoever took over from it."""
        dials = [asyncio.create_task(self._connect(address)) for address in self._addresses]
        connection = None
        try:
            done, _ = await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
            connection = done.pop().result()
            return connection
        finally:
            for dial in dials:
                dial.cancel()
            for other in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(other, _SchedulerConnection) and other is not connection:
                    await other.channel.close()

    async def _connect(self, address: str) -> _SchedulerConnection:
        """Dials one scheduler until it takes a session."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            async with contextlib.AsyncExitStack() as stack:
                channel = await stack.enter_async_context(internal_channel(address))
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
                            return _SchedulerConnection(address, channel, call, first)
                        extra = {"scheduler": address, "epoch": first.epoch, "known_epoch": self._epoch}
                        logger.warning("a scheduler of an older term was left", extra=extra)
            end_if_cancelled()
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def _run_session(self, connection: _SchedulerConnection) -> None:
        """One session, to its end."""
        extra = {"scheduler": connection.address, "epoch": connection.first.epoch}
        logger.info("session opened", extra=extra)
        self._outbox = asyncio.Queue()
        self._connected()
        writer = asyncio.create_task(_write(connection.call, self._outbox))
        why = "the scheduler ended it"
        response: object = connection.first
        try:
            async with asyncio.timeout(None) as limit:
                watchdog = asyncio.create_task(self._watch_heartbeats(limit))
                try:
                    while isinstance(response, scheduler_pb2.SessionResponse):
                        self._handle_response(response)
                        response = await connection.call.read()
                finally:
                    watchdog.cancel()
        except grpc.aio.AioRpcError as error:
            why = error.code().name
        except TimeoutError:
            why = "the scheduler was silent"
        finally:
            writer.cancel()
            self._outbox = None
            self._disconnected()
        logger.warning("session lost", extra={**extra, "why": why})

    async def _watch_heartbeats(self, limit: asyncio.Timeout) -> None:
        """Ends a session whose scheduler says nothing."""
        num_missed = 0
        while num_missed < _MAX_MISSED_HEARTBEATS:
            self._has_received = False
            await asyncio.sleep(_HEARTBEAT_CHECK_SECONDS)
            num_missed = 0 if self._has_received else num_missed + 1
        limit.reschedule(asyncio.get_running_loop().time())

    def _handle_response(self, response: scheduler_pb2.SessionResponse) -> None:
        self._has_received = True
        if response.epoch < self._epoch:
            return
        self._epoch = response.epoch
        if response.HasField("status"):
            self._handle_status(response.status)
        dispatch = self._subscriptions.dispatch
        for event in response.events:
            dispatch(event)

    # What can be served.

    def _handle_status(self, status: scheduler_pb2.Status) -> None:
        self.is_store_degraded = status.is_store_degraded
        self._set_model(self._checked_model(status))
        self._subscriptions.set_accepts_submissions(self.model is not None)

    def _checked_model(self, status: scheduler_pb2.Status) -> ModelInfo | None:
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
        return ModelInfo.from_proto(model)

    def _set_model(self, model: ModelInfo | None) -> None:
        if model is None:
            self._unready_timer.start(_SUBMIT_TIMEOUT_SECONDS)
        else:
            self._unready_timer.stop()
        if model != self.model:
            self.model = model
            self._on_change()

    def _connected(self) -> None:
        self._give_up_timer.stop()
        self._subscriptions.open()

    def _disconnected(self) -> None:
        """The stream broke. Requests wait for the next one: those that run, and those that come meanwhile."""
        self._subscriptions.close()
        self._unready_timer.start(_SUBMIT_TIMEOUT_SECONDS)
        self._give_up_timer.start(self._reconnect_timeout)

    def _give_up_waiting(self) -> None:
        if self.model is not None:
            self.model = None
            self._on_change()
        self._subscriptions.give_up_waiting(request_errors.unavailable("no scheduler can run the request"))

    def _give_up(self) -> None:
        self._subscriptions.give_up(request_errors.unavailable("the connection to the scheduler was lost"))


class _OneShotTimer:
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

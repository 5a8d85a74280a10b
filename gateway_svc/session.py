"""The client of a scheduler's session stream: keeps one stream up, and routes each request's events to it."""

import asyncio
import logging
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import grpc

from gateway_svc.fields import Field
from gateway_svc.generation import ModelFacts, OnLeave
from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from svc_common.channels import inner_channel
from svc_common.durations import to_duration, to_seconds
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

_DIAL_SECONDS = 5.0
_SUBMIT_PATIENCE_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 1.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]"


class RequestEvents(Protocol):
    """What a request is told. None of it waits."""

    def spell(self, which: Field) -> str:
        """A field as the request's client spells it."""

    def on_accepted(self) -> None:
        """The scheduler has queued the request."""

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> None:
        """A sequence grew."""

    def on_failed(self, error: QuireError) -> None:
        """The request is over; nothing more comes."""


class _Phase(Enum):
    SUBMITTED = "submitted"
    ACCEPTED = "accepted"


@dataclass(slots=True, eq=False)
class _Route:
    submit: scheduler_pb2.Submit
    events: RequestEvents
    deadline: float | None
    expiry: asyncio.TimerHandle | None = None
    phase: _Phase = _Phase.SUBMITTED


class SchedulerSession:
    """One gateway's session with whichever scheduler answers first, in the order of the list.

    `model` is what can be served right now, or None. A request that is submitted stays in the session's care, over
    reconnections, until it is accepted; what was accepted fails when its stream breaks.
    """

    def __init__(self, addresses: Sequence[str], name: str, fingerprint: bytes, on_change: Callable[[], None]) -> None:
        """`name` and `fingerprint` are those of the model whose tokenizer this gateway holds."""
        self._addresses = addresses
        self._name = name
        self._fingerprint = fingerprint
        self._on_change = on_change
        self._routes: dict[str, _Route] = {}
        self._outbox: asyncio.Queue[scheduler_pb2.SessionRequest] | None = None
        self._epoch = 0
        self._patience: asyncio.TimerHandle | None = None
        self.model: ModelFacts | None = None

    # Commands.

    def submit(self, submit: scheduler_pb2.Submit, events: RequestEvents, deadline: float | None) -> None:
        """Asks for a request to be run under `submit.key`; `deadline` is on the monotonic clock, in seconds.

        Raises QuireError where no model is ready, or where this gateway runs a request under that key.
        """
        if self.model is None:
            raise QuireError(Reason.MODEL_NOT_READY, "the model is not ready", retry_after=_RETRY_AFTER_SECONDS)
        if submit.key in self._routes:
            raise _key_in_use()
        submit.submission_id = uuid.uuid4().hex
        route = _Route(submit, events, deadline)
        self._routes[submit.key] = route
        if deadline is not None:
            # The scheduler looks too; this one holds even where no scheduler can be reached.
            seconds = max(deadline - time.monotonic(), 0.0)
            route.expiry = asyncio.get_running_loop().call_later(seconds, self._expire, submit.key)
        self._send_submit(route)

    def cancel(self, key: str) -> None:
        """Ends a request, here or on any other gateway; one of ours is told by its events.

        Raises QuireError where no scheduler can be told of a request that is not ours.
        """
        route = self._routes.get(key)
        if self._outbox is None and route is None:
            raise _unavailable("no scheduler can be reached")
        self._send(cancel=scheduler_pb2.Cancel(key=key))
        if route is not None and (self._outbox is None or route.phase is _Phase.SUBMITTED):
            # The scheduler may not know of it yet, and must not be told of it any more.
            self._fail(key, QuireError(Reason.CANCELLED, "the request was cancelled"))

    def release(self, key: str, on_leave: OnLeave | None) -> None:
        """Takes a request out of the session's care: because its client left, or, with None, because it is over."""
        route = self._forget(key)
        if route is None:
            return
        match on_leave:
            case OnLeave.CANCEL:
                self._send_cancel(route)
            case OnLeave.DETACH:
                self._send(detach=scheduler_pb2.Detach(key=key))

    def finish(self, key: str, index: int, num_tokens: int) -> None:
        """Tells that a stop string ended a sequence at `num_tokens`."""
        self._send(finish=scheduler_pb2.Finish(key=key, index=index, num_tokens=num_tokens))

    def acknowledge(self, key: str, index: int, num_tokens: int) -> None:
        """Tells that stop strings were looked for in `num_tokens`."""
        self._send(acknowledge=scheduler_pb2.Acknowledge(key=key, index=index, num_tokens=num_tokens))

    def _send(
        self,
        *,
        submit: scheduler_pb2.Submit | None = None,
        cancel: scheduler_pb2.Cancel | None = None,
        detach: scheduler_pb2.Detach | None = None,
        finish: scheduler_pb2.Finish | None = None,
        acknowledge: scheduler_pb2.Acknowledge | None = None,
    ) -> None:
        if self._outbox is None:
            return  # a stream that breaks tells the scheduler as much
        self._outbox.put_nowait(
            scheduler_pb2.SessionRequest(
                submit=submit, cancel=cancel, detach=detach, finish=finish, acknowledge=acknowledge
            )
        )

    def _send_cancel(self, route: _Route) -> None:
        """Ends our own submission, and no other gateway's under the same key."""
        self._send(cancel=scheduler_pb2.Cancel(key=route.submit.key, submission_id=route.submit.submission_id))

    def _send_submit(self, route: _Route) -> None:
        if route.deadline is not None:
            time_left = max(route.deadline - time.monotonic(), 0.0)
            route.submit.time_left.CopyFrom(to_duration(time_left))
        self._send(submit=route.submit)

    # The stream.

    async def run(self) -> None:
        """Keeps a session up until cancelled."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            if await self._hold_any():
                backoff = _FIRST_BACKOFF_SECONDS
            # Jitter keeps gateways that lost the same scheduler from returning all at once.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def _hold_any(self) -> bool:
        """One session with the first scheduler that answers, to its end; whether any did."""
        for address in self._addresses:
            channel = inner_channel(address)
            try:
                call: _Call = SchedulerServiceStub(channel).Session()
                if await self._hold(call, address):
                    return True
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "TIMEOUT"
                logger.debug("no answer from a scheduler", extra={"scheduler": address, "code": code})
            finally:
                await channel.close()
        return False

    async def _hold(self, call: _Call, address: str) -> bool:
        async with asyncio.timeout(_DIAL_SECONDS):
            response = await call.read()
        if not isinstance(response, scheduler_pb2.SessionResponse):
            return False
        if response.epoch < self._epoch:
            extra = {"scheduler": address, "epoch": response.epoch, "known_epoch": self._epoch}
            logger.warning("a scheduler of an older term was left", extra=extra)
            return False
        logger.info("session opened", extra={"scheduler": address, "epoch": response.epoch})
        self._outbox = asyncio.Queue()
        writer = asyncio.create_task(_write(call, self._outbox))
        code = grpc.StatusCode.OK
        try:
            while isinstance(response, scheduler_pb2.SessionResponse):
                self._take(response)
                response = await call.read()
        except grpc.aio.AioRpcError as error:
            code = error.code()
        finally:
            writer.cancel()
            self._outbox = None
            self._lost()
        logger.warning("session lost", extra={"scheduler": address, "code": code.name})
        return True

    def _take(self, response: scheduler_pb2.SessionResponse) -> None:
        if response.epoch < self._epoch:
            return
        self._epoch = response.epoch
        if response.HasField("status"):
            self._set_model(self._checked(response.status))
        for event in response.events:
            route = self._routes.get(event.key)
            if route is None:
                continue  # its client left
            try:
                self._tell(event, route)
            except Exception:
                error = _internal("an event could not be handled")
                self._send(cancel=scheduler_pb2.Cancel(key=event.key))
                self._fail(event.key, error)

    def _tell(self, event: scheduler_pb2.Event, route: _Route) -> None:
        match event.WhichOneof("kind"):
            case "tokens" if route.phase is _Phase.ACCEPTED:
                route.events.on_tokens(event.tokens)
            case "accepted" if route.phase is _Phase.SUBMITTED:
                route.phase = _Phase.ACCEPTED
                route.events.on_accepted()
            case "failed":
                self._fail(event.key, _error_of(event.failed, route))
            # Tokens before the acceptance are those of a request that had the key before.

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
        if model == self.model:
            return
        was_ready, self.model = self.model is not None, model
        loop = asyncio.get_running_loop()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if model is None:
            self._patience = loop.call_later(_SUBMIT_PATIENCE_SECONDS, self._give_up)
        elif not was_ready:
            for route in self._routes.values():
                if route.phase is _Phase.SUBMITTED:
                    self._send_submit(route)
        self._on_change()

    def _lost(self) -> None:
        """The stream broke. What was accepted fails here: the one place where it could attach instead."""
        for key, route in list(self._routes.items()):
            if route.phase is _Phase.ACCEPTED:
                self._fail(key, _unavailable("the connection to the scheduler was lost"))
        self._set_model(None)

    def _give_up(self) -> None:
        for key, route in list(self._routes.items()):
            if route.phase is _Phase.SUBMITTED:
                self._send_cancel(route)
                self._fail(key, _unavailable("no scheduler can run the request"))

    def _expire(self, key: str) -> None:
        self._send_cancel(self._routes[key])
        self._fail(key, _deadline_exceeded())

    def _fail(self, key: str, error: QuireError) -> None:
        route = self._forget(key)
        if route is not None:
            route.events.on_failed(error)

    def _forget(self, key: str) -> _Route | None:
        route = self._routes.pop(key, None)
        if route is not None and route.expiry is not None:
            route.expiry.cancel()
        return route


async def _write(call: _Call, outbox: asyncio.Queue[scheduler_pb2.SessionRequest]) -> None:
    try:
        while True:
            await call.write(await outbox.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the call is over: its reader says why


# What of a request a scheduler's refusal is about.
_FIELDS = {
    scheduler_pb2.FAILURE_REASON_SEARCH_TOO_WIDE: Field.BEAM_WIDTH,
    scheduler_pb2.FAILURE_REASON_TOO_MANY_TOKENS: Field.MAX_TOKENS,
    scheduler_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: Field.MAX_TOKENS,
}


def _error_of(failed: scheduler_pb2.Failed, route: _Route) -> QuireError:
    """What a client is told of a scheduler's verdict."""
    hint = to_seconds(failed.retry_after) if failed.HasField("retry_after") else None
    soon = _RETRY_AFTER_SECONDS if hint is None else hint
    about = _FIELDS.get(failed.reason)
    field = None if about is None else route.events.spell(about)
    match failed.reason:
        case scheduler_pb2.FAILURE_REASON_KEY_IN_USE:
            return _key_in_use()
        case scheduler_pb2.FAILURE_REASON_DEADLINE_EXCEEDED:
            return _deadline_exceeded()
        case scheduler_pb2.FAILURE_REASON_CANCELLED:
            return QuireError(Reason.CANCELLED, "the request was cancelled")
        case (
            scheduler_pb2.FAILURE_REASON_INVALID
            | scheduler_pb2.FAILURE_REASON_SEARCH_TOO_WIDE
            | scheduler_pb2.FAILURE_REASON_TOO_MANY_TOKENS
        ):
            return QuireError(Reason.INVALID_FIELD, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED:
            return QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, failed.message, field)
        case scheduler_pb2.FAILURE_REASON_UNAVAILABLE:
            return _unavailable("there is no capacity for the request now", soon)
        case scheduler_pb2.FAILURE_REASON_TENANT_OVER_QUOTA:
            subject = f"tenant:{route.submit.tenant}"
            return QuireError(Reason.TENANT_QUOTA_EXCEEDED, failed.message, retry_after=soon, subject=subject)
        case scheduler_pb2.FAILURE_REASON_DEADLINE_INFEASIBLE:
            # Without a hint there is no later at which this deadline would do.
            return QuireError(Reason.DEADLINE_TOO_SHORT, failed.message, retry_after=hint)
    return _internal(failed.message)


def _internal(message: str) -> QuireError:
    """A fault of ours: the client gets an id that leads to the log."""
    error_id = uuid.uuid4().hex
    logger.error("request failed", extra={"error_id": error_id, "why": message}, exc_info=sys.exception())
    return QuireError(Reason.INTERNAL, f"internal error {error_id}")


def _key_in_use() -> QuireError:
    return QuireError(Reason.IDEMPOTENCY_KEY_REUSED, "another request has this request_id")


def _deadline_exceeded() -> QuireError:
    return QuireError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the request was done")


def _unavailable(message: str, retry_after: float = _RETRY_AFTER_SECONDS) -> QuireError:
    return QuireError(Reason.CAPACITY_EXHAUSTED, message, retry_after=retry_after)

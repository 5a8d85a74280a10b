"""Calls about records of requests, over the session: look up, delete."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway_svc import request_errors
from gateway_svc.field_paths import contract_field_path
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError

_TIMEOUT_SECONDS = 10.0
HAS_RECORDS = 3
"""The session protocol from which schedulers have attachments, requests in the background, and these calls."""


@dataclass(slots=True)
class _PendingAnswer:
    """A command without an answer. It is sent once in each session."""

    command: scheduler_pb2.SessionRequest
    answer: "asyncio.Future[scheduler_pb2.Event]"
    num_sent: int = 0


class RecordCalls:
    """A call waits for its answer, over sessions, for 10 s."""

    def __init__(self, send: Callable[[scheduler_pb2.SessionRequest], bool], command_ids: Iterator[int]) -> None:
        """`send` sends a command while a session is open, and otherwise drops it; it returns whether it was sent."""
        self._send = send
        self._command_ids = command_ids
        self._pending: dict[int, _PendingAnswer] = {}
        self._protocol = HAS_RECORDS

    @property
    def is_waiting(self) -> bool:
        """Whether any call waits for its answer."""
        return bool(self._pending)

    def check_protocol(self, needed: int = HAS_RECORDS) -> None:
        """Raises QuireError where the scheduler is of a release without these calls, or without protocol `needed`."""
        if self._protocol < needed:
            raise request_errors.unavailable("the scheduler is of a release that does not serve this yet")

    async def look_up(self, key: str) -> scheduler_pb2.Record:
        """A request as it is now. Raises QuireError, REQUEST_UNKNOWN where there is none."""
        command_id = next(self._command_ids)
        lookup = scheduler_pb2.Lookup(key=key, command_id=command_id)
        event, _ = await self._call(command_id, scheduler_pb2.SessionRequest(lookup=lookup))
        if event.HasField("failed"):
            raise _error_of(event.failed)
        return event.record

    async def delete(self, key: str) -> None:
        """Cancels a request, and removes its record. Raises QuireError, REQUEST_UNKNOWN where there is none."""
        command_id = next(self._command_ids)
        delete = scheduler_pb2.Delete(key=key, command_id=command_id)
        event, was_repeated = await self._call(command_id, scheduler_pb2.SessionRequest(delete=delete))
        if not event.HasField("failed"):
            return
        if was_repeated and event.failed.reason == scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
            return  # the first one may have removed it
        raise _error_of(event.failed)

    def open(self, protocol: int) -> None:
        """A session began, of this protocol."""
        self._protocol = protocol
        for pending in self._pending.values():
            pending.num_sent += self._send(pending.command)

    def handle(self, event: scheduler_pb2.Event) -> bool:
        """Whether an event is the answer to one of these calls."""
        pending = self._pending.get(event.command_id)
        if pending is None:
            return False
        if not pending.answer.done():
            pending.answer.set_result(event)
        return True

    async def _call(self, command_id: int, command: scheduler_pb2.SessionRequest) -> tuple[scheduler_pb2.Event, bool]:
        """The answer to a command, and whether that was repeated."""
        self.check_protocol()
        pending = _PendingAnswer(command, asyncio.get_running_loop().create_future())
        self._pending[command_id] = pending
        pending.num_sent += self._send(command)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return await pending.answer, pending.num_sent > 1
        except TimeoutError:
            raise request_errors.unavailable("no scheduler has answered") from None
        finally:
            del self._pending[command_id]


def _error_of(failed: scheduler_pb2.Failed) -> QuireError:
    if failed.reason == scheduler_pb2.FAILURE_REASON_UNAVAILABLE:
        return request_errors.unavailable("the record of the request cannot be read now")
    return request_errors.error_from_failed(failed, contract_field_path, "")

"""The commands of gateways about records: look up, delete. Neither subscribes to the request."""

import asyncio
import time
from collections.abc import Sequence

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.cancelled_requests import CancelledRequests
from scheduler_svc.core.events import Failure
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.request_log import RecordState, RequestLog
from scheduler_svc.session_wire import failed_to_proto, failure_of_record, message_of, record_message
from scheduler_svc.store.base import StaleEpoch, Store, StoreUnavailable, UnusableRecord

_POLL = 0.005  # seconds
_MAX_WAIT = 2.0  # seconds


class RecordCommands:
    """Handles them, for a caller that keeps the commands of one key in order."""

    def __init__(self, live: LiveRequests, store: Store, journal: Journal, cancelled: CancelledRequests) -> None:
        """What is deleted is added to `cancelled`."""
        self._live = live
        self._store = store
        self._journal = journal
        self._cancelled = cancelled

    async def look_up(self, lookup: scheduler_v1.Lookup, session: GatewaySession) -> None:
        """Sends a request as it is now."""
        try:
            message = await self._record_here(lookup)
            if message is None and (log := await self._store.read(lookup.key)) is not None:
                unflushed_tokens.complete(log)
                message = await self._message_of(log, lookup)
        except StoreUnavailable:
            self._refuse(lookup, session, Failure.UNAVAILABLE, "the store cannot be reached")
        except UnusableRecord as error:
            self._refuse(lookup, session, failure_of_record(error), f"the request has {error}")
        except Exception:
            self._refuse(lookup, session, Failure.INTERNAL, "the request could not be read")
            raise
        else:
            if message is None:
                self._refuse(lookup, session, Failure.UNKNOWN_REQUEST, "there is no such request")
            else:
                message.epoch = self._journal.epoch  # as it is now
                session.send(message)

    async def _record_here(self, lookup: scheduler_v1.Lookup) -> scheduler_v1.SessionResponse | None:
        """A request of this term. If no gateway has its tokens, the store has them then, so that a later term does not
        change them: unless the store is late, or is not to have the request."""
        found = self._find_here(lookup.key)
        if found is None:
            return None
        log = found.log
        counts = [len(sequence.token_ids) for sequence in log.sequences]
        message = await self._message_of(log, lookup)
        until = time.monotonic() + _MAX_WAIT
        while not found.gateways and log.is_writable and not _is_durable(log, counts):
            if self._journal.is_degraded or time.monotonic() > until:
                break
            await asyncio.sleep(_POLL)
        return message

    async def _message_of(self, log: RequestLog, lookup: scheduler_v1.Lookup) -> scheduler_v1.SessionResponse:
        """The message with a request as it is now. It may have tens of megabytes, and is made on a thread."""
        return await asyncio.to_thread(record_message, self._journal.epoch, log.snapshot(), lookup.command_id)

    async def delete(self, delete: scheduler_v1.Delete, session: GatewaySession) -> None:
        """Cancels a request if it is live, and removes its record."""
        key = delete.key
        try:
            found = self._find_here(key)
            was_recorded = await self._journal.remove(key)  # first: a call that fails changes nothing
            self._cancelled.add(key, found.log.submit.submission_id if found is not None else "")
            if found is not None:
                found.log.set_record(RecordState.DELETED)
            if (live := self._live.get(key)) is not None:
                self._live.cancel(live)
        except StaleEpoch:
            return  # the gateway has lost its session, and its client repeats the call
        except StoreUnavailable:
            self._refuse(delete, session, Failure.UNAVAILABLE, "the store cannot be reached")
        except Exception:
            self._refuse(delete, session, Failure.INTERNAL, "the request could not be removed")
            raise
        else:
            if found is None and not was_recorded:
                self._refuse(delete, session, Failure.UNKNOWN_REQUEST, "there is no such request")
            else:
                self._send(session, scheduler_v1.Event(key=key, deleted={}, command_id=delete.command_id))

    def _find_here(self, key: str) -> LiveRequest | None:
        """The request with a key that is live, or whose end the store may not know."""
        return self._live.get(key) or self._live.ended(key)

    def _send(self, session: GatewaySession, event: scheduler_v1.Event) -> None:
        session.send(message_of(self._journal.epoch, event))

    def _refuse(
        self,
        request: scheduler_v1.Lookup | scheduler_v1.Delete,
        session: GatewaySession,
        reason: Failure,
        message: str,
    ) -> None:
        self._send(session, failed_to_proto(request.key, reason, message, None, request.command_id))


def _is_durable(log: RequestLog, counts: Sequence[int]) -> bool:
    """Whether the store has as many tokens of each sequence, and the end of a request that is over."""
    if log.is_over:
        return log.is_durable
    pairs = zip(log.sequences, counts, strict=False)
    return log.is_recorded and all(one.num_durable >= min(count, len(one.token_ids)) for one, count in pairs)

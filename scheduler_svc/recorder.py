"""Recording requests in the store, and finding those that are not live."""

import asyncio
import time

from scheduler_svc import unflushed_tokens
from scheduler_svc.journal import Journal
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.request_log import RecordState, RequestLog, State
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.store.base import StaleEpoch, Store, StoreUnavailable

PATIENCE = 5.0
"""Seconds for which a request that is not live is looked for in a store that fails: without an answer, a stream of its
gateway ends. A change of Redis' primary that is planned takes about a second.
"""

_RETRY = 0.2  # seconds until a read that failed is repeated
_FLUSH = 1.0  # seconds that a request waits at most for the store to know the end of the one that had its key


class Recorder:
    """Records new requests, and reads those that have ended or that an earlier scheduler recorded."""

    def __init__(
        self, live: LiveRequests, store: Store, journal: Journal, rates: RequestRates, *, needs_store: bool
    ) -> None:
        """With `needs_store`, requests that cannot be recorded are refused."""
        self._live = live
        self._store = store
        self._journal = journal
        self._rates = rates
        self._needs_store = needs_store

    def must_be_recorded(self, log: RequestLog) -> bool:
        """Whether a request is refused where it cannot be recorded."""
        return self._needs_store and log.is_writable

    async def record_new(self, live: LiveRequest, *, was_accepted: bool) -> LiveRequest | None:
        """Records a request, or returns the one that has its key. It was counted for its account, unless it
        `was_accepted` before: no longer, where it does not run.

        Raises StoreUnavailable, StaleEpoch, UnusableRecord and DeletedSubmission.
        """
        runs = False
        try:
            found = await self._record(live.log)
            runs = found is None
        except StoreUnavailable:
            runs = not self.must_be_recorded(live.log)
            raise
        finally:
            if not (runs or was_accepted):
                self._rates.give_back(live.request_at(time.monotonic()).limits)
        return found

    async def read(self, key: str, patience: float = 0.0) -> LiveRequest | None:
        """The request with a key, which is not live. A read that fails is repeated for `patience` seconds.

        Raises StoreUnavailable and UnusableRecord.
        """
        ended = self._live.ended(key)
        if ended is not None:
            return ended
        until = time.monotonic() + patience
        while True:
            try:
                found = await self._store.read(key)
            except StoreUnavailable:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(_RETRY)
            else:
                return None if found is None else _restored_request(found)

    async def _record(self, log: RequestLog) -> LiveRequest | None:
        """As `record_new`, without the account.

        The store may not know yet that the request with the key has ended here. Then this one is recorded after that
        end. One that must not be recorded is only looked up by its name: the name may be a recorded one's.
        """
        ended = self._live.ended(log.key)
        if ended is not None and (has_key(ended.log) or ended.log.submit.submission_id == log.submit.submission_id):
            return ended
        if log.is_writable:
            if ended is not None:
                await self._journal.flush(_FLUSH)  # else that one would mostly still be live in the store
            found = await self._put(log)
        else:
            found = await self._store.read(log.key) if log.submit.detachable else None
            if found is not None and not has_key(found):
                found = None
        if found is None or (ended is not None and _is_outdated(found, ended.log)):
            return None
        return _restored_request(found)

    async def _put(self, log: RequestLog) -> RequestLog | None:
        """Records a request, or returns the record that has its key."""
        epoch = self._journal.epoch
        try:
            found = await self._store.put(log, epoch)
        except StaleEpoch:
            async with self._journal.paused():  # if the later epoch is our own, it is set by then
                if self._journal.epoch == epoch:
                    raise
            found = await self._store.put(log, self._journal.epoch)
        if found is None:
            log.set_record(RecordState.RECORDED)
        return found


def has_key(log: RequestLog) -> bool:
    """Whether no other request can have the key: this one is live, or has finished."""
    return log.state in (State.ACCEPTED, State.FINISHED)


def _is_outdated(found: RequestLog, ended: RequestLog) -> bool:
    """Whether a record has ended, as its submission has `ended` here, or a later one under its key has."""
    if found.submit.submission_id == ended.submit.submission_id:
        return True
    return found.state is State.ACCEPTED and ended.record is not RecordState.DISPLACED


def _restored_request(log: RequestLog) -> LiveRequest:
    unflushed_tokens.complete(log)
    return LiveRequest(log)

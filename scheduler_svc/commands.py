"""What gateways ask: to run a request, to take part in one, to end it. What is not live is looked up in the store."""

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.core.plan import FailedEvent, Failure
from scheduler_svc.journal import Journal
from scheduler_svc.keyed_queue import KeyedQueue
from scheduler_svc.live_request import Listener, LiveRequest
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.metrics import REQUESTS_ATTACHED
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.store.base import StaleEpoch, Store, StoreUnavailable
from scheduler_svc.wire import accepted_to_proto, attached_to_proto, failed_to_proto, message_of, reason_from_proto
from svc_common.durations import to_seconds

_FLUSH = 1.0  # seconds that a request may wait for the end of the one that had its key


class Commands:
    """Commands of all sessions. Each key's are carried out in their order; none of them waits here."""

    def __init__(
        self,
        live: LiveRequests,
        store: Store,
        journal: Journal,
        has_session: Callable[[Listener], bool],
        *,
        needs_store: bool,
    ) -> None:
        """`has_session` says whether a session still is; with `needs_store` what cannot be recorded is refused."""
        self._live = live
        self._store = store
        self._journal = journal
        self._has_session = has_session
        self._needs_store = needs_store
        self._queues = KeyedQueue()

    def take(self, request: scheduler_v1.SessionRequest, listener: Listener) -> None:
        """Carry out a command, now or soon."""
        match request.WhichOneof("command"):
            case "submit":
                self._queues.take(request.submit.key, partial(self._submit, request.submit, listener))
            case "attach":
                self._queues.take(request.attach.key, partial(self._attach, request.attach, listener))
            case "cancel":
                self._queues.take(request.cancel.key, partial(self._cancel, request.cancel))
            case "detach":
                self._queues.take(request.detach.key, partial(self._detach, request.detach, listener))
            case "finish":
                self._queues.take(request.finish.key, partial(self._finish, request.finish, listener))
            case "acknowledge":
                self._acknowledge(request.acknowledge, listener)

    # Taking part.

    def _submit(self, submit: scheduler_v1.Submit, listener: Listener) -> Coroutine[None, None, None] | None:
        unflushed = list(submit.unflushed)
        submit.ClearField("unflushed")  # they are taken up once, and the submission stays as long as its request
        live = self._live.get(submit.key)
        if live is not None:
            self._join_existing(live, submit, unflushed, listener)
            return None
        if submit.is_resumption:
            return self._join_recorded(submit, unflushed, listener)
        return self._accept(submit, unflushed, listener)

    async def _accept(self, submit: scheduler_v1.Submit, unflushed: "_Unflushed", listener: Listener) -> None:
        """Record a request, then queue it; or go by the one that has its key."""
        live = LiveRequest(_log_of(submit))
        try:
            # What would be refused is not recorded: its prompt would stay in the store.
            refusal = None if unflushed else self._live.check(live.log)
            if refusal is None:
                found = await self._record(live.log)
        except StaleEpoch:
            return  # the gateway asks again, of whoever leads now
        except StoreUnavailable:
            if self._needs_store:
                message = "the store cannot be reached, and requests are not taken without it"
                _refuse(submit, listener, Failure.STORE_DEGRADED, message)
                return
            found = None
        except Exception:
            _refuse(submit, listener, Failure.INTERNAL, "the request could not be taken")
            raise
        if refusal is not None:
            await self._join_recorded(submit, unflushed, listener, refusal)
        elif found is None:
            self._join(live, submit, unflushed, listener, is_new=True)
        else:
            self._join_existing(found, submit, unflushed, listener)

    def _attach(self, attach: scheduler_v1.Attach, listener: Listener) -> Coroutine[None, None, None] | None:
        live = self._live.get(attach.key)
        if live is None:
            return self._join_recorded(attach, attach.unflushed, listener)
        self._join(live, attach, attach.unflushed, listener)
        return None

    async def _join_recorded(
        self, request: "_Request", unflushed: "_Unflushed", listener: Listener, refusal: FailedEvent | None = None
    ) -> None:
        """Go by the request that has the key, which is not live, and refuse to begin one where there is none.

        With a `refusal`, that is what is said then, and where the store cannot tell, or the key is free again.
        """
        try:
            found = await self._read(request.key)
        except StoreUnavailable:
            if refusal is None:
                _refuse(request, listener, Failure.UNAVAILABLE, "the store cannot be reached")
                return
            found = None
        except Exception:
            _refuse(request, listener, Failure.INTERNAL, "the request could not be taken up")
            raise
        if refusal is not None and (found is None or not _has_key(found.log)):
            _refuse(request, listener, refusal.reason, refusal.message, refusal.retry_after)
        elif found is None:
            _refuse(request, listener, Failure.UNKNOWN_REQUEST, "there is no such request")
        else:
            self._join_existing(found, request, unflushed, listener)

    def _join_existing(
        self, found: LiveRequest, request: "_Request", unflushed: "_Unflushed", listener: Listener
    ) -> None:
        """Take part in the request that has the key, unless something else was submitted."""
        if isinstance(request, scheduler_v1.Submit) and not _is_same(found.log.submit, request):
            _refuse(request, listener, Failure.KEY_IN_USE, "another request has this id")
        else:
            self._join(found, request, unflushed, listener)

    def _join(
        self,
        live: LiveRequest,
        request: "_Request",
        unflushed: "_Unflushed",
        listener: Listener,
        *,
        is_new: bool = False,
    ) -> None:
        """Let a session take part in a request, which runs from now on if it did not; or say why not."""
        log = live.log
        if not _has_key(log):
            _refuse(request, listener, reason_from_proto(log.failure), f"the request has ended: {log.state}")
            return
        try:
            refusal = self._live.resume_request(live, unflushed, is_new=is_new)
        except unflushed_tokens.Diverged as error:
            _refuse(request, listener, Failure.DIVERGED, str(error))
            return
        except Exception:
            _refuse(request, listener, Failure.INTERNAL, "the request could not be taken up")
            raise
        if refusal is not None:
            _refuse(request, listener, refusal.reason, refusal.message, refusal.retry_after)
            return
        if _has_no_output_yet(log, request):
            listener.send(message_of(accepted_to_proto(log, request.attachment_id)))
        else:
            REQUESTS_ATTACHED.inc()
            listener.send(message_of(attached_to_proto(log, request.attachment_id)))
        if self._live.get(log.key) is live:
            live.join(listener)
            if not self._has_session(listener):
                self._live.leave(live, listener, has_broken=True)

    # The store.

    async def _record(self, log: RequestLog) -> LiveRequest | None:
        """Record a request, or return the one that has its key. Raises StoreUnavailable and StaleEpoch.

        What has ended here wins over what the store says, which may not know it yet. Then this one is recorded behind
        that ending.
        """
        ended = self._live.ended(log.key)
        if ended is not None and (_has_key(ended.log) or ended.log.submit.submission_id == log.submit.submission_id):
            return ended
        if ended is not None and not ended.log.is_durable:
            await self._journal.flush(_FLUSH)  # else the store would mostly still have that one for live
        epoch = self._journal.epoch
        try:
            found = await self._store.put(log, epoch)
        except StaleEpoch:
            async with self._journal.paused():  # where the later term is our own, it is known then
                if self._journal.epoch == epoch:
                    raise
            found = await self._store.put(log, self._journal.epoch)
        log.is_recorded = found is None
        if found is None or (ended is not None and _is_outdated(found, ended.log)):
            return None
        return _restored_request(found)

    async def _read(self, key: str) -> LiveRequest | None:
        """The request with a key, which is not live. Raises StoreUnavailable."""
        ended = self._live.ended(key)
        if ended is not None:
            return ended
        found = await self._store.read(key)
        return None if found is None else _restored_request(found)

    # Ending.

    def _cancel(self, cancel: scheduler_v1.Cancel) -> None:
        live = self._live.get(cancel.key)
        if live is None or (cancel.HasField("submission_id") and cancel.submission_id != live.log.submit.submission_id):
            return
        self._live.cancel(live)

    def _detach(self, detach: scheduler_v1.Detach, listener: Listener) -> None:
        live = self._live.get(detach.key)
        if live is not None:
            self._live.leave(live, listener, has_broken=False)

    def _finish(self, finish: scheduler_v1.Finish, listener: Listener) -> Coroutine[None, None, None] | None:
        live = self._live.get(finish.key)
        if live is None:
            return self._finish_record(finish)
        if live.log.submit.submission_id != finish.submission_id:
            return None
        if listener in live.listeners or not live.listeners:  # a verdict may outlive the clients that it was found for
            self._live.truncate(live, finish.index, finish.num_tokens)
        return None

    async def _finish_record(self, finish: scheduler_v1.Finish) -> None:
        """The sequence ended by itself before the verdict was here."""
        try:
            found = await self._read(finish.key)
        except StoreUnavailable:
            return  # whoever replays it finds the same stop string
        if found is None or found.log.submit.submission_id != finish.submission_id:
            return
        if found.log.state is State.FINISHED:
            self._live.truncate_ended(found, finish.index, finish.num_tokens)

    def _acknowledge(self, looked: scheduler_v1.Acknowledge, listener: Listener) -> None:
        live = self._live.get(looked.key)
        if live is not None and listener in live.listeners:
            self._live.acknowledge(live, looked.index, looked.num_tokens)


class _Request(Protocol):
    """A Submit or an Attach."""

    @property
    def key(self) -> str: ...

    @property
    def attachment_id(self) -> int: ...


_Unflushed = Sequence[scheduler_v1.UnflushedTokens]


def _restored_request(log: RequestLog) -> LiveRequest:
    unflushed_tokens.complete(log)
    return LiveRequest(log)


def _log_of(submit: scheduler_v1.Submit) -> RequestLog:
    now = time.time()
    deadline = now + to_seconds(submit.time_left) if submit.HasField("time_left") else None
    log = RequestLog(submit, accepted_at=now, deadline=deadline)
    unflushed_tokens.complete(log)
    return log


def _has_key(log: RequestLog) -> bool:
    """Whether a request keeps its key from others: it is live, or has finished."""
    return log.state in (State.ACCEPTED, State.FINISHED)


def _is_outdated(found: RequestLog, ended: RequestLog) -> bool:
    """Whether what the store has is over, by what has ended here under its key: that one, or one that followed it."""
    if found.submit.submission_id == ended.submit.submission_id:
        return True
    return found.state is State.ACCEPTED and not ended.is_displaced


def _is_same(one: scheduler_v1.Submit, other: scheduler_v1.Submit) -> bool:
    """Whether it is the same submission, or another one of the same body."""
    if one.submission_id == other.submission_id:
        return True
    return bool(one.body_digest) and one.body_digest == other.body_digest


def _has_no_output_yet(log: RequestLog, request: "_Request") -> bool:
    """Whether a submission, maybe repeated, is answered with its acceptance: nobody was given anything of it yet."""
    if not isinstance(request, scheduler_v1.Submit) or request.submission_id != log.submit.submission_id:
        return False
    return not any(sequence.token_ids or sequence.end for sequence in log.sequences)


def _refuse(
    request: "_Request", listener: Listener, reason: Failure, message: str, retry_after: float | None = None
) -> None:
    listener.send(message_of(failed_to_proto(request.key, reason, message, retry_after, request.attachment_id)))

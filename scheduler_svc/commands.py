"""The commands of gateways: submit, attach, cancel, detach, finish, acknowledge. `record_commands` has the others.

A request that is not live is read from the store.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Sequence
from functools import partial
from typing import Protocol

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.cancelled_requests import CancelledRequests
from scheduler_svc.core.events import FailedEvent, Failure
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.keyed_queue import KeyedQueue
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.metrics import REQUESTS_ATTACHED
from scheduler_svc.record_commands import RecordCommands
from scheduler_svc.recorder import PATIENCE, Recorder, has_key
from scheduler_svc.request_log import RequestLog, State
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.session_wire import (
    accepted_to_proto,
    attached_message,
    failed_to_proto,
    failure_of_record,
    message_of,
    protocol_to_render,
    reason_from_proto,
)
from scheduler_svc.store.base import CallNotSent, DeletedSubmission, StaleEpoch, Store, StoreUnavailable, UnusableRecord
from svc_common.attachments import MAX_ATTACHMENT_BYTES
from svc_common.durations import to_seconds

# Seconds that the answer to a request for a value waits to be sent with the value. Nobody sees it before the value, and
# a message takes as much processor time as the value of a short prompt.
_VALUE_DELAY = 0.02
_OLD_GATEWAY = "this gateway is of a release that would return another answer than the client asked for"
_LARGE = 4096  # log-probabilities of a request


class Commands:
    """Handles the commands of all sessions, those of one key in order."""

    def __init__(
        self,
        live: LiveRequests,
        store: Store,
        journal: Journal,
        sessions: Collection[GatewaySession],
        rates: RequestRates,
        *,
        needs_store: bool,
    ) -> None:
        """`sessions` are the open ones. With `needs_store`, requests that cannot be recorded are refused."""
        self._rates = rates
        self._live = live
        self._journal = journal
        self._sessions = sessions
        self._recorder = Recorder(live, store, journal, rates, needs_store=needs_store)
        self._cancelled = CancelledRequests()
        self._records = RecordCommands(live, store, journal, self._cancelled)
        self._queues = KeyedQueue()

    def take(self, request: scheduler_v1.SessionRequest, session: GatewaySession) -> None:
        """Handles a command, now or as soon as the earlier ones of its key are done."""
        match request.WhichOneof("command"):
            case "submit":
                self._queues.take(request.submit.key, partial(self._submit, request.submit, session))
            case "attach":
                self._queues.take(request.attach.key, partial(self._attach, request.attach, session))
            case "cancel":
                self._queues.take(request.cancel.key, partial(self._cancel, request.cancel))
            case "detach":
                self._queues.take(request.detach.key, partial(self._detach, request.detach, session))
            case "finish":
                self._queues.take(request.finish.key, partial(self._finish, request.finish, session))
            case "acknowledge":
                self._acknowledge(request.acknowledge, session)
            case "lookup":
                self._queues.take(request.lookup.key, partial(self._records.look_up, request.lookup, session))
            case "delete":
                self._queues.take(request.delete.key, partial(self._records.delete, request.delete, session))

    # Submit and attach.

    def _submit(self, submit: scheduler_v1.Submit, session: GatewaySession) -> "_Remaining":
        if len(submit.attachment) > MAX_ATTACHMENT_BYTES:
            self._refuse(submit, session, Failure.INVALID, f"the attachment has more than {MAX_ATTACHMENT_BYTES} bytes")
            return None
        if not _can_render(session, submit):
            self._refuse(submit, session, Failure.UNAVAILABLE, _OLD_GATEWAY)
            return None
        unflushed = list(submit.unflushed)
        submit.ClearField("unflushed")  # they are merged once, and the submission stays as long as its request
        was_accepted = submit.was_accepted or bool(unflushed)  # a gateway of protocol 3 does not say so otherwise
        submit.ClearField("was_accepted")
        live = self._live.get(submit.key)
        if live is not None:
            return self._join_existing(live, submit, unflushed, session)
        if submit.is_resumption:
            return self._join_recorded(submit, unflushed, session)
        if not was_accepted:
            self._cancelled.forget(submit.key)
        elif self._cancelled.has(submit.key, submit.submission_id):  # while its gateway was away
            self._refuse(submit, session, Failure.CANCELLED, "cancelled")
            return None
        live = LiveRequest(_log_of(submit))
        if self._needs_no_store(submit, live.log):
            return self._start(live, submit, unflushed, session, is_new=not was_accepted)
        return self._accept(live, submit, unflushed, session, was_accepted=was_accepted)

    def _needs_no_store(self, submit: scheduler_v1.Submit, log: RequestLog) -> bool:
        """Whether a request can be queued or refused at once: it is not recorded, counted, or looked up by its name."""
        needs_store = log.is_writable or submit.detachable or submit.limits.HasField("requests_per_minute")
        return not (needs_store or submit.attachment or self._live.ended(log.key))

    async def _accept(
        self,
        live: LiveRequest,
        submit: scheduler_v1.Submit,
        unflushed: "_Unflushed",
        session: GatewaySession,
        *,
        was_accepted: bool,
    ) -> None:
        """Records a request, then queues it; or joins the one that has its key. One that `was_accepted` by an earlier
        scheduler is counted already, and not refused.
        """
        try:
            # A request that would be refused is not recorded: its prompt would stay in the store.
            refusal = None if was_accepted else self._live.check(live) or await self._refuse_new(live)
            if refusal is None:
                found = await self._recorder.record_new(live, was_accepted=was_accepted)
        except StaleEpoch:
            return  # the gateway repeats the command in its session with the new leader
        except StoreUnavailable as error:
            if self._recorder.must_be_recorded(live.log):
                if not isinstance(error, CallNotSent):
                    self._live.withdraw(live.log)
                self._refuse(submit, session, Failure.STORE_DEGRADED, "requests cannot be recorded now")
                return
            found = None
        except UnusableRecord as error:
            self._refuse(submit, session, failure_of_record(error), f"the request's name is in use by {error}")
            return
        except DeletedSubmission:  # in an earlier term, while its gateway was away
            self._refuse(submit, session, Failure.CANCELLED, "cancelled")
            return
        except Exception:
            self._refuse(submit, session, Failure.INTERNAL, "the request could not be taken")
            raise
        finally:
            self._live.attachments.release(live.log)  # until it starts
        if refusal is not None:
            await self._join_recorded(submit, unflushed, session, refusal)
        elif found is None:
            await _await_remaining(self._start(live, submit, unflushed, session, is_new=not was_accepted))
        else:
            await _await_remaining(self._join_existing(found, submit, unflushed, session))

    def _start(
        self,
        live: LiveRequest,
        submit: scheduler_v1.Submit,
        unflushed: "_Unflushed",
        session: GatewaySession,
        *,
        is_new: bool,
    ) -> "_Remaining":
        """Starts a request that is recorded as far as it must be. Where it is refused, its record ends, too."""
        failure: Failure | None = Failure.INTERNAL
        try:
            refusal = self._resume(live, submit, unflushed, session, is_new=is_new)
            remaining = self._answer(live, submit, session) if refusal is None else None
            failure = refusal
        finally:
            if failure is not None:
                self._live.reject(live, failure)
        return remaining

    async def _refuse_new(self, live: LiveRequest) -> FailedEvent | None:
        """Counts a new request for its account and holds its attachment, or returns why it is rejected."""
        request, call = live.request_at(time.monotonic()), live.log.submit.call
        refusal = self._live.admit_attachment(live.log) or await self._rates.refuse(
            request.limits, call.id, call.num_requests
        )
        if refusal is None:
            return None
        return FailedEvent(request, refusal.failure, refusal.message, refusal.retry_after)

    def _attach(self, attach: scheduler_v1.Attach, session: GatewaySession) -> "_Remaining":
        live = self._live.get(attach.key)
        if live is None:
            return self._join_recorded(attach, attach.unflushed, session)
        return self._join_existing(live, attach, attach.unflushed, session)

    async def _join_recorded(
        self, request: "_Request", unflushed: "_Unflushed", session: GatewaySession, refusal: FailedEvent | None = None
    ) -> None:
        """Joins the request that has the key and is not live, or refuses where there is none.

        A `refusal` is sent instead where there is none, where the store cannot be reached, or where the key is free
        again.
        """
        try:
            found = await self._recorder.read(request.key, PATIENCE if refusal is None else 0.0)
        except StoreUnavailable:
            if refusal is None:
                self._refuse(request, session, Failure.UNAVAILABLE, "the store cannot be reached")
                return
            found = None
        except UnusableRecord as error:
            self._refuse(request, session, failure_of_record(error), f"the request has {error}")
            return
        except Exception:
            self._refuse(request, session, Failure.INTERNAL, "the request could not be resumed")
            raise
        if refusal is not None and (found is None or not has_key(found.log)):
            self._refuse(request, session, refusal.reason, refusal.message, refusal.retry_after)
        elif found is None:
            self._refuse(request, session, Failure.UNKNOWN_REQUEST, "there is no such request")
        else:
            await _await_remaining(self._join_existing(found, request, unflushed, session))

    def _join_existing(
        self, found: LiveRequest, request: "_Request", unflushed: "_Unflushed", session: GatewaySession
    ) -> "_Remaining":
        """Joins the request that has the key, unless its body, or the submission that was asked for, is another one."""
        if isinstance(request, scheduler_v1.Submit):
            if not _is_same(found.log.submit, request):
                self._refuse(request, session, Failure.KEY_IN_USE, "another request has this id")
                return None
        elif request.submission_id not in ("", found.log.submit.submission_id):
            self._refuse(request, session, Failure.UNKNOWN_REQUEST, "another submission has this id")
            return None
        return self._join(found, request, unflushed, session)

    def _join(
        self, live: LiveRequest, request: "_Request", unflushed: "_Unflushed", session: GatewaySession
    ) -> "_Remaining":
        """Attaches a session to a request, and starts it if it does not run; or refuses. Returns what is left to do."""
        failure = self._resume(live, request, unflushed, session)
        return self._answer(live, request, session) if failure is None else None

    def _resume(
        self,
        live: LiveRequest,
        request: "_Request",
        unflushed: "_Unflushed",
        session: GatewaySession,
        *,
        is_new: bool = False,
    ) -> Failure | None:
        """Starts a request if it does not run; or refuses, and returns why."""
        log = live.log
        if not has_key(log):
            failure = reason_from_proto(log.failure)
            return self._refuse(request, session, failure, f"the request has ended: {log.state}")
        if not _can_render(session, log.submit):
            return self._refuse(request, session, Failure.UNAVAILABLE, _OLD_GATEWAY)
        if is_new:
            live.accepted_at = time.monotonic()
        if unflushed and request.model_fingerprint and not log.fingerprint:
            log.fingerprint = request.model_fingerprint
        try:
            refusal = self._live.resume_request(live, unflushed, is_new=is_new)
        except unflushed_tokens.Diverged as error:
            return self._refuse(request, session, Failure.DIVERGED, str(error))
        except Exception:
            self._refuse(request, session, Failure.INTERNAL, "the request could not be resumed")
            raise
        if refusal is not None:
            return self._refuse(request, session, refusal.reason, refusal.message, refusal.retry_after)
        return None

    def _answer(self, live: LiveRequest, request: "_Request", session: GatewaySession) -> "_Remaining":
        """Sends what there is of a request, and attaches the session if it is live. Returns what is left to do."""
        log = live.log
        is_live = self._live.get(log.key) is live
        if _has_no_output_yet(log, request):
            delay = _VALUE_DELAY if live.request_at(time.monotonic()).returns_value else 0.0
            session.send(message_of(self._journal.epoch, accepted_to_proto(log, request.command_id)), delay=delay)
        else:
            REQUESTS_ATTACHED.inc()
            if not is_live and _is_large(log):
                return self._send_ended(log, request, session)
            session.send(attached_message(self._journal.epoch, log, request.command_id))
        if is_live:
            self._live.attach(live, session)
            if session not in self._sessions:
                self._live.leave(live, session, has_broken=True)
        return None

    async def _send_ended(self, log: RequestLog, request: "_Request", session: GatewaySession) -> None:
        """Sends a large request that changes no more. The message is made on a thread."""
        message = await asyncio.to_thread(attached_message, self._journal.epoch, log, request.command_id)
        message.epoch = self._journal.epoch  # as it is now
        session.send(message)

    # Cancel, detach, finish, acknowledge.

    def _cancel(self, cancel: scheduler_v1.Cancel) -> None:
        live = self._live.get(cancel.key)
        if live is None:
            self._cancelled.add(cancel.key, cancel.submission_id)
            return
        submission_id = live.log.submit.submission_id
        if cancel.HasField("submission_id") and cancel.submission_id != submission_id:
            return
        cancelled_at = time.monotonic() - to_seconds(cancel.sent_ago)
        if cancel.HasField("sent_ago") and live.accepted_at is not None and live.accepted_at > cancelled_at:
            return  # another gateway has submitted anew under this name
        self._live.cancel(live)
        self._cancelled.add(cancel.key, submission_id)

    def _detach(self, detach: scheduler_v1.Detach, session: GatewaySession) -> None:
        live = self._live.get(detach.key)
        if live is not None:
            self._live.leave(live, session, has_broken=False)

    def _finish(self, finish: scheduler_v1.Finish, session: GatewaySession) -> "_Remaining":
        live = self._live.get(finish.key)
        if live is None:
            return self._finish_record(finish)
        if live.log.submit.submission_id != finish.submission_id:
            return None
        if session in live.gateways or not live.gateways:  # the readers may have left the gateway since
            self._live.truncate(live, finish.index, finish.num_tokens)
        return None

    async def _finish_record(self, finish: scheduler_v1.Finish) -> None:
        """The request ended before the stop match arrived."""
        try:
            found = await self._recorder.read(finish.key)
        except (StoreUnavailable, UnusableRecord):
            return  # a gateway that replays the request finds the same stop string
        if found is None or found.log.submit.submission_id != finish.submission_id:
            return
        if found.log.state is State.FINISHED:
            self._live.truncate_ended(found, finish.index, finish.num_tokens)

    def _acknowledge(self, acknowledge: scheduler_v1.Acknowledge, session: GatewaySession) -> None:
        live = self._live.get(acknowledge.key)
        if live is not None and session in live.gateways:
            self._live.acknowledge(live, acknowledge.index, acknowledge.num_tokens)

    def _send(self, session: GatewaySession, event: scheduler_v1.Event) -> None:
        session.send(message_of(self._journal.epoch, event))

    def _refuse(
        self,
        request: "_Request",
        session: GatewaySession,
        reason: Failure,
        message: str,
        retry_after: float | None = None,
    ) -> Failure:
        """Sends why a command is refused, and returns that."""
        self._send(session, failed_to_proto(request.key, reason, message, retry_after, request.command_id))
        return reason


class _Request(Protocol):
    """A Submit or an Attach."""

    @property
    def key(self) -> str: ...

    @property
    def command_id(self) -> int: ...

    @property
    def submission_id(self) -> str: ...

    @property
    def model_fingerprint(self) -> bytes: ...


_Unflushed = Sequence[scheduler_v1.UnflushedTokens]
_Remaining = Coroutine[None, None, None] | None
"""The part of a command that waits for something, if there is one."""


async def _await_remaining(rest: _Remaining) -> None:
    if rest is not None:
        await rest


def _is_large(log: RequestLog) -> bool:
    """Whether a message with all of a request takes milliseconds to make."""
    return len(log.prompt_logprobs) + sum(len(one.logprobs) for one in log.sequences) >= _LARGE


def _log_of(submit: scheduler_v1.Submit) -> RequestLog:
    now = time.time()
    deadline = now + to_seconds(submit.time_left) if submit.HasField("time_left") else None
    log = RequestLog(submit, accepted_at=now, deadline=deadline, prompt_cost=submit.prompt_cost)
    unflushed_tokens.complete(log)
    return log


def _can_render(session: GatewaySession, submit: scheduler_v1.Submit) -> bool:
    """Whether a gateway makes the answer that the client asked for out of a request's tokens."""
    return session.protocol >= protocol_to_render(submit.render_options)


def _is_same(one: scheduler_v1.Submit, other: scheduler_v1.Submit) -> bool:
    """Whether it is the same submission, or another one of the same body."""
    if one.submission_id == other.submission_id:
        return True
    return bool(one.body_digest) and one.body_digest == other.body_digest


def _has_no_output_yet(log: RequestLog, request: "_Request") -> bool:
    """Whether a submission, maybe repeated, is answered with Accepted: no gateway has received any output of it."""
    if not isinstance(request, scheduler_v1.Submit) or request.submission_id != log.submit.submission_id:
        return False
    return not log.prompt_logprobs and not any(sequence.token_ids or sequence.end for sequence in log.sequences)

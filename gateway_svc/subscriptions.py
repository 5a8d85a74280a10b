"""Requests and who reads them here: what the scheduler tells goes to its readers, and what a new scheduler must be told
is told."""

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable

from gateway_svc import request_errors
from gateway_svc.stop_matches import StopMatches
from gateway_svc.subscription import DetachReason, RequestObserver, Subscriber, Subscription
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError

_MAX_UNSENT_CANCELS = 10_000


class Attachment:
    """A reader's hold on a request."""

    __slots__ = ("_subscriber", "_subscription", "_subscriptions")

    def __init__(self, subscriptions: "Subscriptions", subscription: Subscription, subscriber: Subscriber) -> None:
        self._subscriptions = subscriptions
        self._subscription = subscription
        self._subscriber = subscriber

    def release(self, on_disconnect: OnDisconnect | None) -> None:
        """Ends it: because its client left, or, with None, because the request is over."""
        self._subscriptions.release(self._subscription, self._subscriber, on_disconnect)

    def finish(self, index: int, num_tokens: int) -> None:
        """Tells that a stop string ended a sequence at `num_tokens`."""
        self._subscriptions.finish(self._subscription, index, num_tokens)

    def acknowledge(self, index: int, num_tokens: int) -> None:
        """Tells that stop strings were looked for in `num_tokens`."""
        self._subscriptions.acknowledge(self._subscription, index, num_tokens)


class Subscriptions:
    """All requests of this gateway. What was sent to a session that broke is made good at the next one."""

    def __init__(self, send: Callable[[scheduler_pb2.SessionRequest], None], reconnect_timeout: float) -> None:
        """`send` takes what is sent while a session is open, and drops what is sent otherwise. `reconnect_timeout` is
        how many
        seconds a request that no scheduler knew waits for one that runs it anew."""
        self._send = send
        self._reconnect_timeout = reconnect_timeout
        self._subscriptions: dict[str, Subscription] = {}
        self._attachment_ids = itertools.count(1)
        self._stop_matches = StopMatches()
        self._unsent_cancels: deque[scheduler_pb2.Cancel] = deque(maxlen=_MAX_UNSENT_CANCELS)
        self._is_open = False
        self._accepts_submissions = False

    # What clients want.

    def subscribe(
        self, key: str, submit: scheduler_pb2.Submit | None, observer: RequestObserver, deadline: float | None
    ) -> Attachment:
        """Lets a reader take part in a request: the one that `submit` asks for or, with None, one that must be there.

        `deadline` is on the monotonic clock, in seconds.
        """
        if submit is not None:
            submit.submission_id = uuid.uuid4().hex
        subscription = self._subscriptions.setdefault(key, Subscription(key))
        subscriber = Subscriber(observer, submit, deadline)
        if deadline is not None:
            # The scheduler looks too; this one holds even where no scheduler can be reached.
            seconds = max(deadline - time.monotonic(), 0.0)
            error = request_errors.deadline_exceeded()
            subscriber.deadline_timer = asyncio.get_running_loop().call_later(
                seconds, self._fail, subscription, subscriber, error, OnDisconnect.CANCEL
            )
        subscription.waiting.append(subscriber)
        self._send_next(subscription)
        return Attachment(self, subscription, subscriber)

    def cancel(self, key: str) -> bool:
        """Ends a request, here or on any other gateway; False where nobody can be told and nothing of it is here."""
        subscription = self._subscriptions.get(key)
        if subscription is None and not self._is_open:
            return False
        self._send_cancel(scheduler_pb2.Cancel(key=key))
        if subscription is not None and not subscription.is_attached:
            # The scheduler may not know of it yet, and must not be told of it any more.
            self._fail_all(subscription, request_errors.cancelled())
        return True

    def release(self, subscription: Subscription, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> None:
        """Takes out a reader whose client left or, with None, has all of the request."""
        if on_disconnect is None and subscription.stop_matches and subscription.subscribers == (subscriber,):
            self._stop_matches.add(subscription.key, subscription.submission_id, subscription.stop_matches)
        self._remove(subscription, subscriber, on_disconnect)

    def finish(self, subscription: Subscription, index: int, num_tokens: int) -> None:
        """Tells of a stop string, once, whoever finds it."""
        if index not in subscription.stop_matches:
            subscription.stop_matches[index] = num_tokens
            self._send_finish(subscription, index)

    def acknowledge(self, subscription: Subscription, index: int, num_tokens: int) -> None:
        """Tells how far stop strings were looked for."""
        acknowledge = scheduler_pb2.Acknowledge(key=subscription.key, index=index, num_tokens=num_tokens)
        self._send(scheduler_pb2.SessionRequest(acknowledge=acknowledge))

    # What becomes of the session.

    def open(self) -> None:
        """A session began, with a scheduler that may know nothing of what runs here."""
        self._is_open = True
        while self._unsent_cancels:
            self._send_cancel(self._unsent_cancels.popleft())
        for finish in self._stop_matches:
            self._send(scheduler_pb2.SessionRequest(finish=finish))
        self._send_next_for_all()

    def set_accepts_submissions(self, accepts: bool) -> None:
        """Whether the scheduler serves the model that requests are for."""
        was_accepting, self._accepts_submissions = self._accepts_submissions, accepts
        if accepts and not was_accepting:
            self._send_next_for_all()

    def close(self) -> None:
        """The session is over."""
        self._is_open = self._accepts_submissions = False
        for subscription in self._subscriptions.values():
            subscription.disconnect()
            self._send_detach(subscription)

    def give_up_waiting(self, error: QuireError) -> None:
        """Fails what no scheduler has accepted."""
        for subscription in list(self._subscriptions.values()):
            for subscriber in list(subscription.waiting):
                if subscriber.submit is not None or not self._is_open:
                    self._fail(subscription, subscriber, error, OnDisconnect.CANCEL)

    def give_up(self, error: QuireError) -> None:
        """Fails everything."""
        for subscription in list(self._subscriptions.values()):
            self._fail_all(subscription, error)

    # What the scheduler tells.

    def dispatch(self, event: scheduler_pb2.Event) -> None:
        """Takes an event to those whom it concerns. One that cannot be handled fails its request alone."""
        subscription = self._subscriptions.get(event.key)
        if subscription is None:
            self._handle_unmatched(event)
            return
        try:
            kind = event.WhichOneof("kind")
            if kind == "tokens":
                # Others are those of a request that had the key before, or do not follow what is here.
                if subscription.is_attached:
                    tokens = event.tokens
                    for subscriber in subscription.subscribers:
                        subscriber.observer.on_tokens(tokens)
            elif kind == "durable":
                self._stop_matches.confirm_durable(event.key, event.durable)
                if subscription.is_attached:
                    subscription.watermarks[event.durable.index] = event.durable.num_tokens
            elif not event.HasField("attachment_id"):
                # Who waits gets an answer of its own.
                if kind == "failed":
                    for subscriber in subscription.subscribers:
                        self._fail(subscription, subscriber, _error_from_failed(event.failed, subscriber))
            elif (
                subscription.pending_attach is not None
                and event.attachment_id == subscription.pending_attach.attachment_id
            ):
                new_subscriber, subscription.pending_attach = subscription.pending_attach.new_subscriber, None
                self._handle_reply(subscription, new_subscriber, event)
                self._send_next(subscription)
            elif kind != "failed" and not subscription.subscribers:
                # Who asked has left before the answer came, and who is asked for now may not be let in.
                subscription.detach_reason = subscription.detach_reason or scheduler_pb2.Detach(key=subscription.key)
                self._send_next(subscription)
        except Exception:
            # Whatever is wrong with it, no other request is to suffer.
            error = request_errors.internal("an event could not be handled")
            self._fail_all(subscription, error, OnDisconnect.CANCEL)

    def _handle_reply(
        self, subscription: Subscription, new_subscriber: Subscriber | None, event: scheduler_pb2.Event
    ) -> None:
        match event.WhichOneof("kind"):
            case "accepted":
                subscription.mark_attached()
                if new_subscriber is not None:
                    assert new_subscriber.submit is not None, "only a submission is accepted"
                    subscription.record_submission(new_subscriber.submit, new_subscriber.deadline)
                    subscription.add(new_subscriber)
                    new_subscriber.observer.on_accepted(event.accepted.is_durable)
            case "attached":
                subscription.mark_attached()
                if new_subscriber is not None:
                    subscription.add(new_subscriber)
                self._merge(subscription, new_subscriber, event.attached)
            case "failed" if new_subscriber is not None:
                self._fail(subscription, new_subscriber, _error_from_failed(event.failed, new_subscriber))
            case "failed" if event.failed.reason == scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
                subscription.is_unknown = True
                subscription.watermarks = {}
                if subscription.submit is None:
                    self._fail_subscribers(
                        subscription, request_errors.unavailable("the request was lost with its scheduler")
                    )
                elif subscription.resubmit_timer is None:
                    loop = asyncio.get_running_loop()
                    subscription.resubmit_timer = loop.call_later(
                        self._reconnect_timeout, self._resubmit_timed_out, subscription
                    )
            case "failed" if event.failed.reason == scheduler_pb2.FAILURE_REASON_DIVERGED and subscription.watermarks:
                # The store has lost what it had, and needs all that is here.
                subscription.watermarks = {}
            case "failed":
                for subscriber in subscription.subscribers:
                    self._fail(subscription, subscriber, _error_from_failed(event.failed, subscriber))

    def _merge(
        self, subscription: Subscription, new_subscriber: Subscriber | None, attached: scheduler_pb2.Attached
    ) -> None:
        """Takes in what a scheduler has of a request: for a newcomer, or for all where the scheduler is new."""
        subscription.submission_id = attached.submission_id
        if new_subscriber is not None and new_subscriber.submit is not None and subscription.submit is None:
            # The same request, but for what was drawn for it. The deadline of who only joins it ends that call alone.
            is_own_submission = new_subscriber.submit.submission_id == attached.submission_id
            submit = scheduler_pb2.Submit()
            submit.CopyFrom(new_subscriber.submit)
            submit.submission_id = attached.submission_id
            submit.sampling.seed = attached.seed
            submit.ClearField("is_resumption")
            subscription.record_submission(submit, new_subscriber.deadline if is_own_submission else None)
        for tokens in attached.sequences:
            is_truncated_there = tokens.HasField("end") and tokens.end.HasField("stop_string")
            if is_truncated_there:
                subscription.stop_matches[tokens.index] = tokens.offset + len(tokens.token_ids)
            elif tokens.index in subscription.stop_matches:
                self._send_finish(subscription, tokens.index)
        for subscriber in subscription.subscribers if new_subscriber is None else (new_subscriber,):
            subscriber.observer.on_attached(attached)

    def _handle_unmatched(self, event: scheduler_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "accepted" | "attached":
                # Who asked has left before the answer came.
                self._send(scheduler_pb2.SessionRequest(detach=scheduler_pb2.Detach(key=event.key)))
            case "durable":
                self._stop_matches.confirm_durable(event.key, event.durable)
            case "failed" if not event.HasField("attachment_id"):
                self._stop_matches.forget(event.key)

    # What is asked of the scheduler.

    def _send_next_for_all(self) -> None:
        for subscription in list(self._subscriptions.values()):
            self._send_next(subscription)

    def _send_next(self, subscription: Subscription) -> None:
        """Asks what is to be asked next, if anything: what runs here goes before who wants to join it."""
        if subscription.pending_attach is not None:
            return
        self._send_detach(subscription)
        if not self._is_open:
            return
        new_subscriber = None
        if subscription.is_attached or not subscription.subscribers:
            if not subscription.waiting:
                return
            new_subscriber = subscription.waiting[0]
        submits = subscription.is_unknown if new_subscriber is None else new_subscriber.submit is not None
        if not submits:
            attach = subscription.begin_attach(new_subscriber, next(self._attachment_ids))
            self._send(scheduler_pb2.SessionRequest(attach=attach))
        elif self._accepts_submissions:
            submit = subscription.begin_submit(new_subscriber, next(self._attachment_ids))
            self._send(scheduler_pb2.SessionRequest(submit=submit))

    def _send_finish(self, subscription: Subscription, index: int) -> None:
        finish = scheduler_pb2.Finish(
            key=subscription.key,
            index=index,
            num_tokens=subscription.stop_matches[index],
            submission_id=subscription.submission_id,
        )
        self._send(scheduler_pb2.SessionRequest(finish=finish))

    def _send_cancel(self, cancel: scheduler_pb2.Cancel) -> None:
        if self._is_open:
            self._send(scheduler_pb2.SessionRequest(cancel=cancel))
        else:
            # The next scheduler may run it on, for nobody.
            self._unsent_cancels.append(cancel)

    # Ends.

    def _remove(self, subscription: Subscription, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> None:
        """Takes a reader out; the last one decides what becomes of the request, unless one that was asked for joins."""
        detach_reason, was_waiting = (
            subscription.detach_reason_of(subscriber, on_disconnect),
            subscriber not in subscription.subscribers,
        )
        if not subscription.remove(subscriber):
            return
        if was_waiting and isinstance(detach_reason, scheduler_pb2.Cancel):
            self._send_cancel(detach_reason)  # of its own submission, which nobody else can have joined here
        elif not subscription.subscribers and subscription.detach_reason is None:
            subscription.detach_reason = detach_reason
        if subscription.subscribers or subscription.waiting:
            self._send_next(subscription)
        else:
            del self._subscriptions[subscription.key]
            self._send_detach(subscription)

    def _send_detach(self, subscription: Subscription) -> None:
        detach_reason: DetachReason | None
        detach_reason, subscription.detach_reason = subscription.detach_reason, None
        if isinstance(detach_reason, scheduler_pb2.Cancel):
            self._send_cancel(detach_reason)
        elif detach_reason is not None:
            self._send(scheduler_pb2.SessionRequest(detach=detach_reason))

    def _resubmit_timed_out(self, subscription: Subscription) -> None:
        subscription.resubmit_timer = None
        self._fail_subscribers(
            subscription, request_errors.unavailable("no scheduler can run the request anew"), OnDisconnect.DETACH
        )

    def _fail(
        self,
        subscription: Subscription,
        subscriber: Subscriber,
        error: QuireError,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        self._remove(subscription, subscriber, on_disconnect)
        subscriber.observer.on_failed(error)

    def _fail_subscribers(
        self, subscription: Subscription, error: QuireError, on_disconnect: OnDisconnect | None = None
    ) -> None:
        for subscriber in subscription.subscribers:
            self._fail(subscription, subscriber, error, on_disconnect)

    def _fail_all(
        self, subscription: Subscription, error: QuireError, on_disconnect: OnDisconnect | None = None
    ) -> None:
        # Those that wait go first, the last of them before the others: else they would be asked for in between.
        for subscriber in (*reversed(subscription.waiting), *subscription.subscribers):
            self._fail(subscription, subscriber, error, on_disconnect)


def _error_from_failed(failed: scheduler_pb2.Failed, subscriber: Subscriber) -> QuireError:
    tenant = "" if subscriber.submit is None else subscriber.submit.tenant
    return request_errors.error_from_failed(failed, subscriber.observer.field_path, tenant)

"""All subscriptions of this gateway: delivers events to readers, and brings a new scheduler up to date."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator

from gateway_svc import request_errors
from gateway_svc.kept_ends import KeptEnds
from gateway_svc.reader import Acknowledgement, Reader, ReaderAction, Release, StopFound
from gateway_svc.subscription import Subscriber, Subscription
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2
from svc_common.durations import to_duration
from svc_common.errors import QuireError

_MAX_CANCELS = 10_000  # that are kept for the next session
_CANCEL_SECONDS = 5.0
"""Longer than a session with a scheduler that hangs stays open: it has received what was sent before."""


class Attachment:
    """A reader's place in a subscription, for the call that it reads for."""

    __slots__ = ("_subscriber", "_subscription", "_subscriptions")

    def __init__(self, subscriptions: "Subscriptions", subscription: Subscription, subscriber: Subscriber) -> None:
        self._subscriptions = subscriptions
        self._subscription = subscription
        self._subscriber = subscriber

    def release(self, on_disconnect: OnDisconnect) -> None:
        """Ends it, if it has not ended: the client left."""
        self._subscriptions.release(self._subscription, self._subscriber, on_disconnect)


class Subscriptions:
    """All requests that have readers here, by key.

    A Submit, Attach or Cancel that a lost session may not have delivered is sent again in the next session; a Finish as
    an Attach with the tokens up to it.
    """

    def __init__(
        self,
        send: Callable[[scheduler_pb2.SessionRequest], object],
        reconnect_timeout: float,
        command_ids: Iterator[int],
    ) -> None:
        """`send` sends a command while a session is open, and otherwise drops it. `reconnect_timeout` is how many
        seconds a request that the scheduler does not know waits to be submitted again."""
        self._send = send
        self._reconnect_timeout = reconnect_timeout
        self._subscriptions: dict[str, Subscription] = {}
        self._command_ids = command_ids
        self._kept_ends = KeptEnds()
        # Each with the time when its client cancelled.
        self._unsent_cancels: deque[tuple[scheduler_pb2.Cancel, float]] = deque(maxlen=_MAX_CANCELS)
        # When each was sent in this session, oldest first, and when its client cancelled, by key and submission id. An
        # empty id is any submission.
        self._sent_cancels: dict[tuple[str, str], tuple[float, float]] = {}
        self._is_open = False
        self._accepted_models: frozenset[str] = frozenset()
        self._is_store_degraded = False

    # Clients.

    def subscribe(
        self, key: str, submit: scheduler_pb2.Submit | None, reader: Reader, deadline: float | None
    ) -> Attachment:
        """Adds a reader to the request of `submit` or, with None, to one that must exist.

        `deadline` is on the monotonic clock, in seconds.
        """
        if submit is not None:
            submit.submission_id = uuid.uuid4().hex
            self._sent_cancels.pop((key, ""), None)  # it must not cancel this one
        subscription = self._subscriptions.setdefault(key, Subscription(key))
        subscriber = Subscriber(reader, submit, deadline)
        if deadline is not None:
            # The scheduler enforces it too; this timer also works while no scheduler can be reached.
            seconds = max(deadline - time.monotonic(), 0.0)
            error = request_errors.deadline_exceeded()
            subscriber.deadline_timer = asyncio.get_running_loop().call_later(
                seconds, self._fail, subscription, subscriber, error, OnDisconnect.CANCEL
            )
        subscription.waiting.append(subscriber)
        self._send_next(subscription)
        return Attachment(self, subscription, subscriber)

    def cancel(self, key: str) -> bool:
        """Cancels a request, wherever its readers are. False where no session is open and no reader is here."""
        subscription = self._subscriptions.get(key)
        if subscription is None and not self._is_open:
            return False
        self._send_cancel(
            scheduler_pb2.Cancel(key=key), "" if subscription is None else subscription.submission.submission_id
        )
        if subscription is not None and not subscription.is_attached:
            # The scheduler may not have the request yet, and then sends no event about it.
            self._fail_all(subscription, request_errors.cancelled())
        return True

    def release(self, subscription: Subscription, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> None:
        """Removes a reader whose client left. `on_disconnect` is None if the reader has received everything."""
        submission = subscription.submission
        if on_disconnect is None and subscription.subscribers == (subscriber,):
            # Until the end is durable nobody else has it: a scheduler that takes over would compute it again.
            unflushed = subscriber.reader.unflushed(submission.watermarks)
            self._kept_ends.add(subscription.key, submission.submission_id, unflushed, submission.model_fingerprint)
        self._remove(subscription, subscriber, on_disconnect)

    # The session.

    def open(self) -> None:
        """A session began, with a scheduler that may have no request of this gateway."""
        self._is_open = True
        while self._unsent_cancels:
            cancel, cancelled_at = self._unsent_cancels.popleft()
            self._send_cancel(cancel, cancel.submission_id, cancelled_at)
        for attach in self._kept_ends:
            attach.command_id = next(self._command_ids)
            self._send(scheduler_pb2.SessionRequest(attach=attach))
        self._send_next_for_all()

    def set_status(self, accepted_models: Collection[str], *, is_store_degraded: bool) -> None:
        """`accepted_models` are the names of the models that can be submitted for; other submissions wait."""
        before, self._accepted_models = self._accepted_models, frozenset(accepted_models)
        self._is_store_degraded = is_store_degraded
        if self._accepted_models - before:
            self._send_next_for_all()

    def close(self) -> None:
        """The session has ended."""
        self._is_open, self._accepted_models = False, frozenset()
        oldest = time.monotonic() - _CANCEL_SECONDS
        for (key, submission_id), (sent_at, cancelled_at) in self._sent_cancels.items():
            if sent_at >= oldest:
                cancel = scheduler_pb2.Cancel(key=key, submission_id=submission_id or None)
                self._unsent_cancels.append((cancel, cancelled_at))
        self._sent_cancels.clear()
        for subscription in self._subscriptions.values():
            subscription.session_lost()
            self._send_detach(subscription)

    def give_up_submissions(self, model: str, error: QuireError) -> None:
        """Fails the waiting readers that submit for a model."""
        self._give_up_waiting(lambda submit: submit is not None and submit.model == model, error)

    def give_up_attaches(self, error: QuireError) -> None:
        """Fails the waiting readers of requests that must exist."""
        self._give_up_waiting(lambda submit: submit is None, error)

    def give_up(self, error: QuireError) -> None:
        """Fails all readers."""
        for subscription in list(self._subscriptions.values()):
            self._fail_all(subscription, error)

    def _give_up_waiting(self, is_affected: Callable[[scheduler_pb2.Submit | None], bool], error: QuireError) -> None:
        for subscription in list(self._subscriptions.values()):
            for subscriber in list(subscription.waiting):
                if is_affected(subscriber.submit):
                    # The client of a named request repeats it, maybe at another gateway, where it attaches to this
                    # submission: a Cancel would end it there, whenever it is sent.
                    is_named = subscriber.submit is not None and subscriber.submit.detachable
                    on_disconnect = OnDisconnect.DETACH if is_named else OnDisconnect.CANCEL
                    self._fail(subscription, subscriber, error, on_disconnect)

    # The scheduler's events.

    def dispatch(self, event: scheduler_pb2.Event) -> None:
        """Delivers an event to the readers that it concerns. One that cannot be handled fails its request alone."""
        subscription = self._subscriptions.get(event.key)
        if subscription is None:
            self._handle_unmatched(event)
            return
        try:
            self._handle(subscription, event)
        except Exception:
            # Whatever is wrong with it, no other request must fail.
            error = request_errors.internal("an event could not be handled")
            self._fail_all(subscription, error, OnDisconnect.CANCEL)

    def _handle(self, subscription: Subscription, event: scheduler_pb2.Event) -> None:
        # While not attached, output is that of an earlier request under the key, or leaves a gap.
        is_attached = subscription.is_attached
        match event.WhichOneof("kind"):
            case "tokens":
                if is_attached:
                    self._deliver_tokens(subscription, event.tokens)
            case "prompt_logprobs":
                for subscriber in subscription.subscribers if is_attached else ():
                    subscriber.reader.on_prompt_logprobs(event.prompt_logprobs)
            case "durable":
                self._kept_ends.confirm_durable(event.key, event.durable)
                if is_attached:
                    subscription.submission.watermarks[event.durable.index] = event.durable.num_tokens
            case "prompt_paid":
                if is_attached:
                    subscription.submission.prompt_cost = event.prompt_paid.num_tokens
            case kind if event.HasField("command_id"):
                self._handle_reply(subscription, event, has_failed=kind == "failed")
            case "failed":  # waiting readers get an answer of their own
                self._fail_with(subscription, event.failed)

    def _handle_reply(self, subscription: Subscription, event: scheduler_pb2.Event, *, has_failed: bool) -> None:
        """Handles the answer to a command, which may be an earlier one than the unanswered command."""
        if event.command_id == subscription.command_id:
            self._handle_answer(subscription, event)
            self._send_next(subscription)
        elif not has_failed and not subscription.subscribers:
            # The reader left before this answer came, and the next waiting reader may be refused.
            subscription.leave_command = subscription.leave_command or scheduler_pb2.Detach(key=subscription.key)
            self._send_next(subscription)

    def _deliver_tokens(self, subscription: Subscription, tokens: scheduler_pb2.Tokens) -> None:
        submission = subscription.submission
        if not submission.model_fingerprint:
            submission.model_fingerprint = tokens.model_fingerprint
        for subscriber in subscription.subscribers:
            for action in subscriber.reader.on_tokens(tokens):
                self._carry_out(subscription, subscriber, action)

    def _handle_answer(self, subscription: Subscription, event: scheduler_pb2.Event) -> None:
        """Handles the answer to the unanswered command."""
        joining = subscription.joining
        match event.WhichOneof("kind"):
            case "accepted":
                subscription.admit()
                if joining is not None:
                    assert joining.submit is not None, "only a submission is accepted"
                    subscription.record_submission(joining.submit, joining.deadline)
                    joining.reader.on_accepted(event.accepted.is_durable)
            case "attached":
                subscription.admit()
                self._merge(subscription, joining, event.attached)
            case "failed" if joining is not None:
                self._fail(subscription, joining, _error_from_failed(event.failed, joining))
            case "failed" if event.failed.reason == scheduler_pb2.FAILURE_REASON_UNKNOWN_REQUEST:
                subscription.unknown()
                self._wait_to_resubmit(subscription)
            case "failed" if (
                event.failed.reason == scheduler_pb2.FAILURE_REASON_DIVERGED and subscription.submission.watermarks
            ):
                subscription.diverged()
            case "failed":
                self._fail_with(subscription, event.failed)

    def _merge(self, subscription: Subscription, joining: Subscriber | None, attached: scheduler_pb2.Attached) -> None:
        """Adds the output that the scheduler sent: for the reader that joins, or for all if the scheduler is new."""
        submission = subscription.submission
        submission.submission_id = attached.submission_id
        if joining is not None and joining.submit is not None and submission.submit is None:
            # The body is the same; submission id, seed and retention may be another submission's. The deadline of a
            # call that only joins ends that call alone.
            is_own_submission = joining.submit.submission_id == attached.submission_id
            submit = scheduler_pb2.Submit()
            submit.CopyFrom(joining.submit)
            submit.submission_id = attached.submission_id
            submit.sampling.seed = attached.seed
            submit.ClearField("retention")
            if attached.HasField("retention"):
                submit.retention.CopyFrom(attached.retention)
            submit.ClearField("is_resumption")
            subscription.record_submission(submit, joining.deadline if is_own_submission else None)
        for tokens in attached.sequences:
            submission.model_fingerprint = tokens.model_fingerprint or submission.model_fingerprint
            is_truncated_there = tokens.HasField("end") and tokens.end.HasField("stop_string")
            if is_truncated_there:
                submission.stop_matches[tokens.index] = tokens.offset + len(tokens.token_ids)
            elif tokens.index in submission.stop_matches:
                self._send_finish(subscription, tokens.index)
        is_recorded = attached.is_durable or not attached.HasField("is_durable")
        is_durable = is_recorded and not self._is_store_degraded
        for subscriber in subscription.subscribers if joining is None else (joining,):
            for action in subscriber.reader.on_attached(attached, is_durable=is_durable):
                self._carry_out(subscription, subscriber, action)

    def _wait_to_resubmit(self, subscription: Subscription) -> None:
        if subscription.submission.submit is None:
            error = request_errors.unavailable("the request was lost with its scheduler")
            self._fail_subscribers(subscription, error)
        elif subscription.resubmit_timer is None:
            subscription.resubmit_timer = asyncio.get_running_loop().call_later(
                self._reconnect_timeout, self._resubmit_timed_out, subscription
            )

    def _resubmit_timed_out(self, subscription: Subscription) -> None:
        subscription.resubmit_timer = None
        error = request_errors.unavailable("no scheduler could run the request again")
        self._fail_subscribers(subscription, error, OnDisconnect.DETACH)

    def _handle_unmatched(self, event: scheduler_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "accepted" | "attached":
                # The reader left before the answer came.
                self._send(scheduler_pb2.SessionRequest(detach=scheduler_pb2.Detach(key=event.key)))
            case "durable":
                self._kept_ends.confirm_durable(event.key, event.durable)
            case "failed" if not event.HasField("command_id"):
                self._kept_ends.forget(event.key)

    def _carry_out(self, subscription: Subscription, subscriber: Subscriber, action: ReaderAction) -> None:
        match action:
            case StopFound(index, num_tokens):
                # Readers of one request find the same stop string; it is sent once.
                if index not in subscription.submission.stop_matches:
                    subscription.submission.stop_matches[index] = num_tokens
                    self._send_finish(subscription, index)
            case Acknowledgement(index, num_tokens):
                acknowledge = scheduler_pb2.Acknowledge(key=subscription.key, index=index, num_tokens=num_tokens)
                self._send(scheduler_pb2.SessionRequest(acknowledge=acknowledge))
            case Release(on_disconnect):
                self.release(subscription, subscriber, on_disconnect)

    # Commands.

    def _send_next_for_all(self) -> None:
        for subscription in list(self._subscriptions.values()):
            self._send_next(subscription)

    def _send_next(self, subscription: Subscription) -> None:
        """Sends the command that is due, unless one is unanswered."""
        if subscription.command_id is not None:
            return
        self._send_detach(subscription)
        if self._is_open:
            command = subscription.next_command(self._accepted_models, self._command_ids)
            if command is not None:
                self._send(command)

    def _send_finish(self, subscription: Subscription, index: int) -> None:
        finish = scheduler_pb2.Finish(
            key=subscription.key,
            index=index,
            num_tokens=subscription.submission.stop_matches[index],
            submission_id=subscription.submission.submission_id,
        )
        self._send(scheduler_pb2.SessionRequest(finish=finish))

    def _send_cancel(self, cancel: scheduler_pb2.Cancel, submission_id: str, cancelled_at: float | None = None) -> None:
        """Sends it, or keeps it. `submission_id` is that of the submission that it cancels; empty: not known.

        `cancelled_at` is when its client cancelled; None: just now.
        """
        now = time.monotonic()
        if not self._is_open:
            # Kept for the next scheduler, which might otherwise run the request without readers.
            self._unsent_cancels.append((cancel, cancelled_at or now))
            return
        if cancelled_at is not None and not submission_id:
            cancel.sent_ago.CopyFrom(to_duration(now - cancelled_at))
        self._send(scheduler_pb2.SessionRequest(cancel=cancel))
        self._sent_cancels.pop((cancel.key, submission_id), None)
        self._sent_cancels[cancel.key, submission_id] = (now, cancelled_at or now)
        oldest = now - _CANCEL_SECONDS
        while len(self._sent_cancels) > _MAX_CANCELS or next(iter(self._sent_cancels.values()))[0] < oldest:
            del self._sent_cancels[next(iter(self._sent_cancels))]

    def _send_detach(self, subscription: Subscription) -> None:
        leave_command = subscription.take_leave_command()
        if isinstance(leave_command, scheduler_pb2.Cancel):
            self._send_cancel(leave_command, leave_command.submission_id)
        elif leave_command is not None:
            self._send(scheduler_pb2.SessionRequest(detach=leave_command))

    # Readers leave or fail.

    def _remove(self, subscription: Subscription, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> None:
        if subscriber not in subscription.subscribers and subscriber not in subscription.waiting:
            return
        cancel = subscription.remove(subscriber, on_disconnect)
        if isinstance(cancel, scheduler_pb2.Cancel):
            self._send_cancel(cancel, cancel.submission_id)
        if subscription.subscribers or subscription.waiting:
            self._send_next(subscription)
        else:
            subscription.close()
            del self._subscriptions[subscription.key]
            self._send_detach(subscription)

    def _fail(
        self,
        subscription: Subscription,
        subscriber: Subscriber,
        error: QuireError,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        self._remove(subscription, subscriber, on_disconnect)
        subscriber.reader.on_failed(error)

    def _fail_subscribers(
        self, subscription: Subscription, error: QuireError, on_disconnect: OnDisconnect | None = None
    ) -> None:
        for subscriber in subscription.subscribers:
            self._fail(subscription, subscriber, error, on_disconnect)

    def _fail_with(self, subscription: Subscription, failed: scheduler_pb2.Failed) -> None:
        for subscriber in subscription.subscribers:
            self._fail(subscription, subscriber, _error_from_failed(failed, subscriber))

    def _fail_all(
        self, subscription: Subscription, error: QuireError, on_disconnect: OnDisconnect | None = None
    ) -> None:
        # Waiting readers fail first, the latest of them first: no command may be sent for one that fails next.
        for subscriber in (*reversed(subscription.waiting), *subscription.subscribers):
            self._fail(subscription, subscriber, error, on_disconnect)


def _error_from_failed(failed: scheduler_pb2.Failed, subscriber: Subscriber) -> QuireError:
    tenant = "" if subscriber.submit is None else subscriber.submit.tenant
    return request_errors.error_from_failed(failed, subscriber.reader.field_path, tenant)

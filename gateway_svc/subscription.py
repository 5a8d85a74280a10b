"""One request between its readers here and whichever scheduler leads: its state, and the commands that it sends."""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway_svc.reader import Reader
from gateway_svc.subscription_state import SubscriptionEvent, SubscriptionState, next_state
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2
from svc_common.durations import to_duration

LeaveCommand: TypeAlias = scheduler_pb2.Cancel | scheduler_pb2.Detach


@dataclass(slots=True, eq=False)
class Subscriber:
    """A reader of the request. With `submit` it runs or joins it; with None the request must exist. `deadline` is on
    the monotonic clock, in seconds."""

    reader: Reader
    submit: scheduler_pb2.Submit | None
    deadline: float | None
    deadline_timer: asyncio.TimerHandle | None = None
    was_sent: bool = False
    """Whether its command was sent, so that a scheduler may have the request."""


@dataclass(slots=True)
class _Submission:
    """The submission that runs under the request's key, as far as this gateway knows it."""

    submission_id: str = ""
    model_fingerprint: bytes = b""
    """The version of the model that computed its tokens; empty while there are none."""
    submit: scheduler_pb2.Submit | None = None
    """Set where this gateway could submit it again."""
    deadline: float | None = None
    prompt_cost: int = 0
    """What its account has paid for the prompt, as far as the scheduler has said so."""
    watermarks: dict[int, int] = field(default_factory=dict)
    """How many tokens of each sequence are durable, by index."""
    stop_matches: dict[int, int] = field(default_factory=dict)
    """Where stop strings ended sequences, in tokens, by index."""


class Subscription:
    """A request and its readers.

    At most one command of a subscription is unanswered, so that the next one can depend on the answer. In OPENING and
    JOINING the command is about the first of `waiting`, in ATTACHING and RESUBMITTING about all `subscribers`.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.state = SubscriptionState.IDLE
        self.waiting: deque[Subscriber] = deque()
        """Readers that do not receive events yet, oldest first."""
        self.subscribers: tuple[Subscriber, ...] = ()
        """Readers that receive events. Replaced when it changes, so that it may change during a delivery."""
        self.command_id: int | None = None
        """Of the unanswered command."""
        self.submission = _Submission()
        self.leave_command: LeaveCommand | None = None
        """What is sent for readers that left, unless a waiting reader is admitted first."""
        self.resubmit_timer: asyncio.TimerHandle | None = None
        """Limits the time from the first answer "unknown request" until a scheduler runs the request again."""

    @property
    def is_attached(self) -> bool:
        """Whether readers receive events."""
        return self.state is SubscriptionState.ATTACHED or self.state is SubscriptionState.JOINING

    @property
    def joining(self) -> Subscriber | None:
        """The waiting reader whose command is unanswered."""
        is_joining = self.state in (SubscriptionState.OPENING, SubscriptionState.JOINING)
        return self.waiting[0] if is_joining else None

    # Commands.

    def next_command(
        self, accepted_models: Collection[str], command_ids: Iterator[int]
    ) -> scheduler_pb2.SessionRequest | None:
        """The command that is due now, if any. Subscribers attach again before waiting readers are admitted."""
        match self.state:
            case SubscriptionState.IDLE | SubscriptionState.ATTACHED if self.waiting:
                return self._join(self.waiting[0], accepted_models, command_ids)
            case SubscriptionState.DISCONNECTED:
                unflushed = self.subscribers[0].reader.unflushed(self.submission.watermarks)
                self._sent(SubscriptionEvent.ATTACH_SENT, command_ids)
                return scheduler_pb2.SessionRequest(attach=self._attach(unflushed))
            case SubscriptionState.UNKNOWN:
                submit = self.submission.submit
                if submit is None or submit.model not in accepted_models:
                    return None
                self._sent(SubscriptionEvent.RESUBMIT_SENT, command_ids)
                request = self._submit(submit, self.submission.deadline)
                request.submit.unflushed.extend(self.subscribers[0].reader.unflushed({}))
                request.submit.model_fingerprint = self.submission.model_fingerprint
                request.submit.was_accepted = True
                request.submit.prompt_cost = self.submission.prompt_cost
                return request
        return None

    def _join(
        self, subscriber: Subscriber, accepted_models: Collection[str], command_ids: Iterator[int]
    ) -> scheduler_pb2.SessionRequest | None:
        submit = subscriber.submit
        if submit is not None and submit.model not in accepted_models:
            return None
        self._sent(SubscriptionEvent.JOIN_SENT, command_ids)
        was_sent, subscriber.was_sent = subscriber.was_sent, True
        if submit is None:
            return scheduler_pb2.SessionRequest(attach=self._attach([]))
        request = self._submit(submit, subscriber.deadline)
        if was_sent:  # others of its call may have been accepted, and are not sent again: it counts alone
            request.submit.ClearField("call")
        return request

    def _sent(self, event: SubscriptionEvent, command_ids: Iterator[int]) -> None:
        self._advance(event)
        self.command_id = next(command_ids)

    def _attach(self, unflushed: list[scheduler_pb2.UnflushedTokens]) -> scheduler_pb2.Attach:
        return scheduler_pb2.Attach(
            key=self.key,
            command_id=self.command_id,
            unflushed=unflushed,
            model_fingerprint=self.submission.model_fingerprint if unflushed else b"",
        )

    def _submit(self, submit: scheduler_pb2.Submit, deadline: float | None) -> scheduler_pb2.SessionRequest:
        request = scheduler_pb2.SessionRequest(submit=submit)
        request.submit.command_id = self.command_id or 0
        if deadline is not None:
            request.submit.time_left.CopyFrom(to_duration(max(deadline - time.monotonic(), 0.0)))
        return request

    # Answers.

    def admit(self) -> Subscriber | None:
        """The unanswered command was accepted or attached: returns the reader that receives events from now on, or None
        where the command was for all subscribers."""
        admitted = self.joining
        self._answered(SubscriptionEvent.ADMITTED)
        self._cancel_resubmit_timer()
        if admitted is not None:
            self.waiting.popleft()
            self.subscribers = (*self.subscribers, admitted)
            self.leave_command = None
        return admitted

    def unknown(self) -> None:
        """The scheduler has no such request, and so nothing of it is durable."""
        self._answered(SubscriptionEvent.UNKNOWN_REQUEST)
        self.submission.watermarks = {}

    def diverged(self) -> None:
        """The store has lost tokens that were durable: the next Attach sends all of them."""
        self._answered(SubscriptionEvent.DIVERGED)
        self.submission.watermarks = {}

    def session_lost(self) -> None:
        """The session has ended: an unanswered command stays unanswered, and the next scheduler knows no reader."""
        self._answered(SubscriptionEvent.SESSION_LOST)

    def record_submission(self, submit: scheduler_pb2.Submit, deadline: float | None) -> None:
        """Sets the submission that runs, which this gateway can repeat."""
        self.submission.submit, self.submission.deadline = submit, deadline
        self.submission.submission_id = submit.submission_id

    def take_leave_command(self) -> LeaveCommand | None:
        """What is to be sent for readers that left; it is sent once."""
        leave_command, self.leave_command = self.leave_command, None
        return leave_command

    # Readers leave.

    def remove(self, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> LeaveCommand | None:
        """Removes a reader, if it is still there.

        Returns what has to be sent at once: the Cancel of a submission that was not answered, and that no other reader
        here can have joined. Anything else that has to be sent becomes the `leave_command`.
        """
        leave_command = self._leave_command_of(subscriber, on_disconnect)
        was_waiting = subscriber in self.waiting
        if was_waiting:
            is_joining = subscriber is self.joining
            self.waiting.remove(subscriber)
            if is_joining:
                self._answered(SubscriptionEvent.JOIN_DROPPED)
        elif subscriber in self.subscribers:
            self.subscribers = tuple(one for one in self.subscribers if one is not subscriber)
            if not self.subscribers:
                self._readers_left()
        else:
            return None
        if subscriber.deadline_timer is not None:
            subscriber.deadline_timer.cancel()
        if was_waiting and isinstance(leave_command, scheduler_pb2.Cancel):
            return leave_command
        if not self.subscribers and self.leave_command is None:
            self.leave_command = leave_command
        return None

    def close(self) -> None:
        """No reader is left."""
        self._advance(SubscriptionEvent.CLOSE)

    def _leave_command_of(self, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> LeaveCommand | None:
        """What has to be sent if this reader is the last one. It cancels its own submission, and never another's."""
        if on_disconnect is None or not subscriber.was_sent:
            return None
        if on_disconnect is OnDisconnect.CANCEL and subscriber.submit is not None:
            submission_id = subscriber.submit.submission_id
            if subscriber not in self.subscribers or submission_id == self.submission.submission_id:
                return scheduler_pb2.Cancel(key=self.key, submission_id=submission_id)
        return scheduler_pb2.Detach(key=self.key)

    def _readers_left(self) -> None:
        if self.state is SubscriptionState.JOINING:
            self._advance(SubscriptionEvent.READERS_LEFT)  # the command of the waiting reader stays unanswered
        else:
            self._answered(SubscriptionEvent.READERS_LEFT)
        self.submission = _Submission()
        self._cancel_resubmit_timer()

    def _answered(self, event: SubscriptionEvent) -> None:
        self._advance(event)
        self.command_id = None

    def _advance(self, event: SubscriptionEvent) -> None:
        self.state = next_state(self.state, event)

    def _cancel_resubmit_timer(self) -> None:
        if self.resubmit_timer is not None:
            self.resubmit_timer.cancel()
            self.resubmit_timer = None

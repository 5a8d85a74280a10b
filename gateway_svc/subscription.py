"""One request on its way between readers here and whichever scheduler leads."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from gateway_svc.field_paths import Field
from gateway_svc.validated_request import OnDisconnect
from quire.scheduler.v1 import scheduler_pb2
from svc_common.durations import to_duration
from svc_common.errors import QuireError

DetachReason: TypeAlias = scheduler_pb2.Cancel | scheduler_pb2.Detach


class RequestObserver(Protocol):
    """One call's end of a request, and what it is told. None of it waits."""

    def field_path(self, which: Field, item_index: int | None = None) -> str:
        """A field as the reader's client spells it."""

    def on_accepted(self, is_durable: bool) -> None:
        """The scheduler has queued the request."""

    def on_attached(self, attached: scheduler_pb2.Attached) -> None:
        """The request was there already, and this is what came of it so far. Told again by each new scheduler."""

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> None:
        """A sequence grew."""

    def on_failed(self, error: QuireError) -> None:
        """It is over; nothing more comes."""

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.UnflushedTokens]:
        """What it has of each sequence from an offset on, by index, or else from the beginning."""


@dataclass(slots=True, eq=False)
class Subscriber:
    """A reader's place at a request: it asked for `submit`, or, with None, for what is there. `deadline` is on the
    monotonic clock, in seconds."""

    observer: RequestObserver
    submit: scheduler_pb2.Submit | None
    deadline: float | None
    deadline_timer: asyncio.TimerHandle | None = None
    was_sent: bool = False
    """Whether a scheduler may have heard of it."""


@dataclass(frozen=True, slots=True)
class PendingAttach:
    """What a scheduler was asked and has not answered: to let a newcomer in or, with None, to go on with those who
    are there."""

    attachment_id: int
    new_subscriber: Subscriber | None


@dataclass(slots=True, eq=False)
class Subscription:
    """A request and its readers. Its scheduler is asked one thing at a time, so that the next question can heed the
    answer."""

    key: str
    waiting: deque[Subscriber] = field(default_factory=deque)
    """Readers that want to take part, in the order of their asking."""
    subscribers: tuple[Subscriber, ...] = ()
    """Those that do. Replaced when it changes, so that it may change while they are told something."""
    pending_attach: PendingAttach | None = None
    is_attached: bool = False
    """Whether the scheduler of this session knows of the readers."""
    is_unknown: bool = False
    """Whether it said that it has no such request."""
    submission_id: str = ""
    """The submission that runs."""
    submit: scheduler_pb2.Submit | None = None
    """What runs, where this gateway knows all of it."""
    deadline: float | None = None
    resubmit_timer: asyncio.TimerHandle | None = None
    """Ends the wait for a scheduler that runs anew what none knew."""
    watermarks: dict[int, int] = field(default_factory=dict)
    """How many tokens of each sequence the store is known to have."""
    stop_matches: dict[int, int] = field(default_factory=dict)
    """Where stop strings ended sequences, in tokens."""
    detach_reason: DetachReason | None = None
    """What is to be told of readers who left, unless a newcomer that was asked for is let in."""

    def add(self, new_subscriber: Subscriber) -> None:
        """Lets the one that waits longest in."""
        self.waiting.popleft()
        self.subscribers = (*self.subscribers, new_subscriber)
        self.detach_reason = None

    def detach_reason_of(self, subscriber: Subscriber, on_disconnect: OnDisconnect | None) -> DetachReason | None:
        """What is to be told where nobody is left once this reader leaves. It ends what it submitted itself, and never
        what it joined."""
        if on_disconnect is None or not subscriber.was_sent:
            return None
        if on_disconnect is OnDisconnect.CANCEL and subscriber.submit is not None:
            submission_id = subscriber.submit.submission_id
            if subscriber not in self.subscribers or submission_id == self.submission_id:
                return scheduler_pb2.Cancel(key=self.key, submission_id=submission_id)
        return scheduler_pb2.Detach(key=self.key)

    def record_submission(self, submit: scheduler_pb2.Submit, deadline: float | None) -> None:
        """Notes what runs."""
        self.submit, self.deadline, self.submission_id = submit, deadline, submit.submission_id

    def mark_attached(self) -> None:
        """Notes that the scheduler knows of the readers."""
        self.is_attached = True
        self._cancel_resubmit_timer()

    def remove(self, subscriber: Subscriber) -> bool:
        """Takes a reader out; whether it was there."""
        if subscriber in self.subscribers:
            self.subscribers = tuple(one for one in self.subscribers if one is not subscriber)
            if not self.subscribers:
                self._reset()
        elif subscriber in self.waiting:
            self.waiting.remove(subscriber)
            if self.pending_attach is not None and self.pending_attach.new_subscriber is subscriber:
                self.pending_attach = None
        else:
            return False
        if subscriber.deadline_timer is not None:
            subscriber.deadline_timer.cancel()
        return True

    def disconnect(self) -> None:
        """Notes that the session is over, and with it what was asked and answered."""
        self.pending_attach = None
        self.is_attached = self.is_unknown = False

    def begin_attach(self, new_subscriber: Subscriber | None, attachment_id: int) -> scheduler_pb2.Attach:
        """Asks to take part in what is there, and brings what the store may lack of it."""
        self.pending_attach = PendingAttach(attachment_id, new_subscriber)
        if new_subscriber is None:
            unflushed = self.subscribers[0].observer.unflushed(self.watermarks)
        else:
            new_subscriber.was_sent, unflushed = True, []
        return scheduler_pb2.Attach(key=self.key, attachment_id=attachment_id, unflushed=unflushed)

    def begin_submit(self, new_subscriber: Subscriber | None, attachment_id: int) -> scheduler_pb2.Submit:
        """Asks for what the newcomer wants or, with None, for what ran here, from where it stands."""
        self.pending_attach = PendingAttach(attachment_id, new_subscriber)
        asked, deadline = (
            (self.submit, self.deadline) if new_subscriber is None else (new_subscriber.submit, new_subscriber.deadline)
        )
        assert asked is not None, "the caller looks whether there is one"
        submit = scheduler_pb2.Submit()
        submit.CopyFrom(asked)
        submit.attachment_id = attachment_id
        if new_subscriber is None:
            submit.unflushed.extend(self.subscribers[0].observer.unflushed({}))
        else:
            new_subscriber.was_sent = True
        if deadline is not None:
            submit.time_left.CopyFrom(to_duration(max(deadline - time.monotonic(), 0.0)))
        return submit

    def _reset(self) -> None:
        """Nobody takes part any more; who waits asks for the request as it then is."""
        if self.pending_attach is not None and self.pending_attach.new_subscriber is None:
            self.pending_attach = None
        self.is_attached = self.is_unknown = False
        self.submit = self.deadline = None
        self.submission_id = ""
        self.watermarks, self.stop_matches = {}, {}
        self._cancel_resubmit_timer()

    def _cancel_resubmit_timer(self) -> None:
        if self.resubmit_timer is not None:
            self.resubmit_timer.cancel()
            self.resubmit_timer = None

"""One request on its way between readers here and whichever scheduler leads."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from gateway_svc.fields import Field
from gateway_svc.generation import OnLeave
from quire.scheduler.v1 import scheduler_pb2
from svc_common.durations import to_duration
from svc_common.errors import QuireError

Farewell: TypeAlias = scheduler_pb2.Cancel | scheduler_pb2.Detach


class Reader(Protocol):
    """One call's end of a request, and what it is told. None of it waits."""

    def spell(self, which: Field, place: int | None = None) -> str:
        """A field as the reader's client spells it."""

    def on_accepted(self, is_durable: bool) -> None:
        """The scheduler has queued the request."""

    def on_attached(self, attached: scheduler_pb2.Attached) -> None:
        """The request was there already, and this is what came of it so far. Told again by each new scheduler."""

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> None:
        """A sequence grew."""

    def on_failed(self, error: QuireError) -> None:
        """It is over; nothing more comes."""

    def tails(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.Tail]:
        """What it has of each sequence from an offset on, by index, or else from the beginning."""


@dataclass(slots=True, eq=False)
class Seat:
    """A reader's place at a request: it asked for `submit`, or, with None, for what is there. `deadline` is on the
    monotonic clock, in seconds."""

    reader: Reader
    submit: scheduler_pb2.Submit | None
    deadline: float | None
    expiry: asyncio.TimerHandle | None = None
    is_asked: bool = False
    """Whether a scheduler may have heard of it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a scheduler was asked and has not answered: to let a newcomer in or, with None, to go on with those who
    are there."""

    attachment_id: int
    newcomer: Seat | None


@dataclass(slots=True, eq=False)
class Route:
    """A request and its readers. Its scheduler is asked one thing at a time, so that the next question can heed the
    answer."""

    key: str
    waiting: deque[Seat] = field(default_factory=deque)
    """Readers that want to take part, in the order of their asking."""
    seats: tuple[Seat, ...] = ()
    """Those that do. Replaced when it changes, so that it may change while they are told something."""
    question: Question | None = None
    is_attached: bool = False
    """Whether the scheduler of this session knows of the readers."""
    is_unknown: bool = False
    """Whether it said that it has no such request."""
    submission_id: str = ""
    """The submission that runs."""
    submit: scheduler_pb2.Submit | None = None
    """What runs, where this gateway knows all of it."""
    deadline: float | None = None
    rescue: asyncio.TimerHandle | None = None
    """Ends the wait for a scheduler that runs anew what none knew."""
    watermarks: dict[int, int] = field(default_factory=dict)
    """How many tokens of each sequence the store is known to have."""
    cuts: dict[int, int] = field(default_factory=dict)
    """Where stop strings ended sequences, in tokens."""
    farewell: Farewell | None = None
    """What is to be told of readers who left, unless a newcomer that was asked for is let in."""

    def seat(self, newcomer: Seat) -> None:
        """Lets the one that waits longest in."""
        self.waiting.popleft()
        self.seats = (*self.seats, newcomer)
        self.farewell = None

    def farewell_of(self, seat: Seat, on_leave: OnLeave | None) -> Farewell | None:
        """What is to be told where nobody is left once this reader leaves. It ends what it submitted itself, and never
        what it joined."""
        if on_leave is None or not seat.is_asked:
            return None
        if on_leave is OnLeave.CANCEL and seat.submit is not None:
            submission_id = seat.submit.submission_id
            if seat not in self.seats or submission_id == self.submission_id:
                return scheduler_pb2.Cancel(key=self.key, submission_id=submission_id)
        return scheduler_pb2.Detach(key=self.key)

    def run(self, submit: scheduler_pb2.Submit, deadline: float | None) -> None:
        """Notes what runs."""
        self.submit, self.deadline, self.submission_id = submit, deadline, submit.submission_id

    def attach(self) -> None:
        """Notes that the scheduler knows of the readers."""
        self.is_attached = True
        self._end_rescue()

    def remove(self, seat: Seat) -> bool:
        """Takes a reader out; whether it was there."""
        if seat in self.seats:
            self.seats = tuple(one for one in self.seats if one is not seat)
            if not self.seats:
                self._forget()
        elif seat in self.waiting:
            self.waiting.remove(seat)
            if self.question is not None and self.question.newcomer is seat:
                self.question = None
        else:
            return False
        if seat.expiry is not None:
            seat.expiry.cancel()
        return True

    def disconnect(self) -> None:
        """Notes that the session is over, and with it what was asked and answered."""
        self.question = None
        self.is_attached = self.is_unknown = False

    def to_attach(self, newcomer: Seat | None, attachment_id: int) -> scheduler_pb2.Attach:
        """Asks to take part in what is there, and brings what the store may lack of it."""
        self.question = Question(attachment_id, newcomer)
        if newcomer is None:
            tails = self.seats[0].reader.tails(self.watermarks)
        else:
            newcomer.is_asked, tails = True, []
        return scheduler_pb2.Attach(key=self.key, attachment_id=attachment_id, tails=tails)

    def to_submit(self, newcomer: Seat | None, attachment_id: int) -> scheduler_pb2.Submit:
        """Asks for what the newcomer wants or, with None, for what ran here, from where it stands."""
        self.question = Question(attachment_id, newcomer)
        asked, deadline = (self.submit, self.deadline) if newcomer is None else (newcomer.submit, newcomer.deadline)
        assert asked is not None, "the caller looks whether there is one"
        submit = scheduler_pb2.Submit()
        submit.CopyFrom(asked)
        submit.attachment_id = attachment_id
        if newcomer is None:
            submit.tails.extend(self.seats[0].reader.tails({}))
        else:
            newcomer.is_asked = True
        if deadline is not None:
            submit.time_left.CopyFrom(to_duration(max(deadline - time.monotonic(), 0.0)))
        return submit

    def _forget(self) -> None:
        """Nobody takes part any more; who waits asks for the request as it then is."""
        if self.question is not None and self.question.newcomer is None:
            self.question = None
        self.is_attached = self.is_unknown = False
        self.submit = self.deadline = None
        self.submission_id = ""
        self.watermarks, self.cuts = {}, {}
        self._end_rescue()

    def _end_rescue(self) -> None:
        if self.rescue is not None:
            self.rescue.cancel()
            self.rescue = None

"""A request's log: what was asked, and what came of it so far. The journal copies it to the store, behind the steps."""

from dataclasses import dataclass, field
from enum import StrEnum

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1


class State(StrEnum):
    """Where a request stands."""

    ACCEPTED = "accepted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    FAILED = "failed"


@dataclass(slots=True)
class SequenceLog:
    """One sequence's output. `logprobs` has one for each token where they were asked for, and is empty else.

    `num_durable` of its tokens, and its end if `is_end_durable`, stand in the store.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[worker_v1.TokenLogprobs] = field(default_factory=list)
    end: scheduler_v1.SequenceEnd | None = None
    cached_tokens: int = 0
    score: float | None = None
    num_durable: int = 0
    is_end_durable: bool = False


@dataclass(slots=True, eq=False)
class RequestLog:
    """One request. `accepted_at`, `ended_at` and `deadline` are in seconds since 1970.

    Of a beam search there are no sequences until it is over.
    """

    submit: scheduler_v1.Submit
    accepted_at: float
    deadline: float | None = None
    state: State = State.ACCEPTED
    ended_at: float | None = None
    sequences: list[SequenceLog] = field(default_factory=list)
    is_recorded: bool = False
    """Whether the store has the record, however many of its tokens."""
    failure: scheduler_v1.FailureReason | None = None
    """Why it ended without all its tokens, where it did."""
    fingerprint: bytes = b""
    """Of the model that began it; empty while none did."""
    is_ending_durable: bool = False
    """Whether the store knows that it is over."""
    is_displaced: bool = False
    """Whether its key is another submission's in the store: then this one is not recorded, nor will be."""
    key: str = field(init=False)
    """The request's key."""

    def __post_init__(self) -> None:
        self.key = self.submit.key  # asked for in every step

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, however it did."""
        return self.state is not State.ACCEPTED

    @property
    def is_durable(self) -> bool:
        """Whether the store has all that is here."""
        return (
            self.is_recorded
            and self.is_ending_durable == self.is_over
            and all(
                one.num_durable == len(one.token_ids) and one.is_end_durable == (one.end is not None)
                for one in self.sequences
            )
        )

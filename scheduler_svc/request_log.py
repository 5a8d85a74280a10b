"""A request's log: the submission, its output so far, and how much of both is in the store."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1


class State(StrEnum):
    """The outcome of a request, as it is recorded."""

    ACCEPTED = "accepted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    FAILED = "failed"


class RecordState(Enum):
    """What the store has of a request besides its tokens."""

    UNRECORDED = auto()
    """No record, as far as is known: none was written yet, or the store has lost it."""
    RECORDED = auto()
    """The submission."""
    COMPLETE = auto()
    """The submission and its outcome."""
    EXCLUDED = auto()
    """Nothing, by the request's own choice: nothing of it is ever written."""
    DISPLACED = auto()
    """The record of another submission under the same key. This one is not recorded, and will not be."""
    DELETED = auto()
    """Nothing: the record was removed because the client asked for it."""


RECORD_TRANSITIONS: Mapping[RecordState, frozenset[RecordState]] = {
    RecordState.UNRECORDED: frozenset({RecordState.RECORDED, RecordState.DISPLACED, RecordState.DELETED}),
    RecordState.RECORDED: frozenset(
        {RecordState.COMPLETE, RecordState.UNRECORDED, RecordState.DISPLACED, RecordState.DELETED}
    ),
    # A request that has ended is live again if a gateway has tokens beyond the recorded end.
    RecordState.COMPLETE: frozenset(
        {RecordState.RECORDED, RecordState.UNRECORDED, RecordState.DISPLACED, RecordState.DELETED}
    ),
    RecordState.EXCLUDED: frozenset({RecordState.DELETED}),
    RecordState.DISPLACED: frozenset({RecordState.DELETED}),
    RecordState.DELETED: frozenset(),
}


@dataclass(slots=True)
class SequenceLog:
    """One sequence's output. `logprobs` has one for each token where they were requested, and is empty otherwise.

    `num_durable` of its tokens, and its end if `is_end_durable`, are in the store.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[worker_v1.TokenLogprobs] = field(default_factory=list)
    end: scheduler_v1.SequenceEnd | None = None
    cached_tokens: int = 0
    score: float | None = None
    num_durable: int = 0
    is_end_durable: bool = False

    def truncate(self, num_tokens: int) -> None:
        """Drops its end, and every token after the first `num_tokens`."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens:]
        self.end = None
        self.num_durable = min(self.num_durable, num_tokens)
        self.is_end_durable = False

    def lose(self, num_tokens: int) -> None:
        """The store has at most `num_tokens` of its tokens, and no end."""
        self.num_durable = min(self.num_durable, num_tokens)
        self.is_end_durable = False


@dataclass(slots=True, eq=False)
class RequestLog:
    """One request. `accepted_at`, `ended_at` and `deadline` are in seconds since 1970.

    A beam search has no sequences until it has ended.
    """

    submit: scheduler_v1.Submit
    accepted_at: float
    deadline: float | None = None
    state: State = State.ACCEPTED
    ended_at: float | None = None
    sequences: list[SequenceLog] = field(default_factory=list)
    prompt_logprobs: list[worker_v1.TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens after the first, where they were requested."""
    num_prompt_logprobs_durable: int = 0
    """How many of them are in the store."""
    record: RecordState = RecordState.UNRECORDED
    failure: scheduler_v1.FailureReason | None = None
    """Why it ended without all its tokens, where it did."""
    fingerprint: bytes = b""
    """Of the version of the model that computed its tokens or its prompt; empty while nothing is computed."""
    key_id: str | None = None
    """The id of the key that its record is encrypted with; empty: it is not encrypted. None: as new records are."""
    prompt_cost: int = 0
    """What its account has paid for the prompt, in tokens; 0 before, and without a limit of tokens."""
    is_prompt_cost_durable: bool = False
    """Whether that is in the store."""
    key: str = field(init=False)
    """The request's key."""

    def __post_init__(self) -> None:
        self.key = self.submit.key  # read in every step
        if self.submit.retention.is_unrecorded:
            self.record = RecordState.EXCLUDED

    @property
    def model(self) -> str:
        """The name of its model. Protocol 1 has the name in the render options only."""
        return self.submit.model or self.submit.render_options.model

    def snapshot(self) -> "RequestLog":
        """A copy that stays as the log is now."""
        sequences = [replace(one, token_ids=list(one.token_ids), logprobs=list(one.logprobs)) for one in self.sequences]
        return replace(self, sequences=sequences, prompt_logprobs=list(self.prompt_logprobs))

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, with whatever outcome."""
        return self.state is not State.ACCEPTED

    @property
    def is_writable(self) -> bool:
        """Whether it may be written to the store."""
        return self.record not in (RecordState.EXCLUDED, RecordState.DISPLACED, RecordState.DELETED)

    @property
    def kept_seconds(self) -> int | None:
        """How long its record is kept after its end; 0: only as long as a client may be about to resume it; None: as
        long as records are kept.
        """
        return self.submit.retention.seconds if self.submit.HasField("retention") else None

    @property
    def most_kept_seconds(self) -> int | None:
        """The most that `kept_seconds` of 0 may be; None: any."""
        return self.submit.retention.most_seconds or None

    @property
    def is_withdrawn(self) -> bool:
        """Whether it was refused because it is not known whether the store has recorded it."""
        return self.failure == scheduler_v1.FAILURE_REASON_STORE_DEGRADED

    @property
    def is_recorded(self) -> bool:
        """Whether the store has the submission, however many of its tokens."""
        return self.record in (RecordState.RECORDED, RecordState.COMPLETE)

    @property
    def is_durable(self) -> bool:
        """Whether the store has everything in this log."""
        return (
            self.record is (RecordState.COMPLETE if self.is_over else RecordState.RECORDED)
            and self.num_prompt_logprobs_durable == len(self.prompt_logprobs)
            and (self.is_prompt_cost_durable or not self.prompt_cost)
            and all(
                one.num_durable == len(one.token_ids) and one.is_end_durable == (one.end is not None)
                for one in self.sequences
            )
        )

    def set_record(self, record: RecordState) -> None:
        """Sets what the store has. The same state may be set again; a transition that is not in the table raises."""
        if record is self.record:
            return
        if record not in RECORD_TRANSITIONS[self.record]:
            raise AssertionError(f"a request that is {self.record.name} cannot become {record.name}")
        self.record = record

    def end(self, state: State, ended_at: float, failure: scheduler_v1.FailureReason | None) -> None:
        """Sets the outcome."""
        self.state, self.ended_at, self.failure = state, ended_at, failure

    def reopen(self) -> None:
        """Makes a finished request live again: a gateway has tokens beyond its end."""
        self.state, self.ended_at = State.ACCEPTED, None
        if self.record is RecordState.COMPLETE:
            self.set_record(RecordState.RECORDED)
